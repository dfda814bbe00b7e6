"""The section of learning curves of a phase."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from roll_batching.tools.report.charts import (
    BLUE,
    COLORS,
    DASHES,
    ORANGE,
    Chart,
    Section,
    Trace,
    line,
    points,
    window_note,
)
from roll_batching.tools.report.run_files import RunFiles

RUN_COLORS = (BLUE, ORANGE)


@dataclass(frozen=True, kw_only=True)
class _Curves:
    """Columns that share a chart."""

    title: str
    y: str
    columns: Sequence[tuple[str, str]] = ()
    """Column and label."""
    prefix: str = ""
    """Beginning of further columns of the chart; the rest of their names is the label."""
    spread: str | None = None
    """Column with the standard deviation of the first column inside a step, for the band."""
    held_out: str | None = None
    note: str = ""
    percent: bool = False
    from_zero: bool = False
    is_scientific: bool = False


_CHARTS = (
    _Curves(
        title="Reward",
        y="reward",
        columns=[("reward", "training prompts")],
        spread="reward_std",
        held_out="eval_reward",
        note="Band: one standard deviation of the rewards of a step.",
    ),
    _Curves(title="Reward by domain", y="reward", prefix="reward/"),
    _Curves(
        title="Response length",
        y="tokens",
        columns=[("response_length_mean", "mean"), ("response_length_max", "longest")],
        from_zero=True,
    ),
    _Curves(title="Loss", y="loss", columns=[("loss", "training")], held_out="eval_loss"),
    _Curves(
        title="KL divergence",
        y="nats per token",
        columns=[
            ("approx_kl", "from the old policy"),
            ("ref_kl", "from the reference"),
            ("engine_kl", "engine to policy"),
            ("reward_kl", "in the reward"),
        ],
    ),
    _Curves(title="Entropy", y="nats per token", columns=[("entropy", "policy")], from_zero=True),
    _Curves(
        title="Shares",
        y="share",
        columns=[("finished_share", "responses that ended themselves"), ("clip_fraction", "clipped tokens")],
        percent=True,
        from_zero=True,
    ),
    _Curves(title="Marks of the reward", y="share of responses", prefix="mark/", percent=True, from_zero=True),
    _Curves(
        title="Preferences",
        y="reward",
        columns=[("reward_margin", "margin"), ("chosen_reward", "chosen")],
    ),
    _Curves(title="Preferred pairs", y="share", columns=[("reward_accuracy", "accuracy")], percent=True),
    _Curves(title="Gradient norm", y="norm", columns=[("grad_norm", "before clipping")], from_zero=True),
    _Curves(
        title="Learning rate",
        y="learning rate",
        columns=[("lr", "last of the step")],
        from_zero=True,
        is_scientific=True,
    ),
)


def learning_section(runs: Sequence[RunFiles], phase: str) -> Section:
    """Section of the curves of a phase; two runs share the charts."""
    charts = [chart for curves in _CHARTS if (chart := _chart(curves, runs, phase)) is not None]
    counts = [len(run.of_phase(phase)) for run in runs]
    absent = [f"{run.label} has no phase {phase}." for run, count in zip(runs, counts, strict=True) if not count]
    note = " ".join([window_note(counts), *absent]).strip()
    return Section(title=f"Learning: {phase}", note=note, charts=charts)


def _chart(curves: _Curves, runs: Sequence[RunFiles], phase: str) -> Chart | None:
    """The chart of `curves`; None if no run has the columns."""
    traces: list[Trace] = []
    is_short = True  # whether all curves show each step: only then `curves.note` describes the band
    for number, run in enumerate(runs):
        rows = run.of_phase(phase)
        names = sorted({key for row in rows for key in row.values if curves.prefix and key.startswith(curves.prefix)})
        columns = [*curves.columns, *((name, name.removeprefix(curves.prefix).replace("_", " ")) for name in names)]
        columns = [pair for pair in columns if any(pair[0] in row.values for row in rows)][: len(COLORS)]
        is_short = is_short and not window_note([len(rows)])
        prefix = f"{run.label}: " if len(runs) > 1 else ""
        for index, (key, label) in enumerate(columns):
            traces += line(
                rows,
                key,
                prefix + label,
                RUN_COLORS[number] if len(runs) > 1 else COLORS[index],
                dash=DASHES[index % len(DASHES)] if len(runs) > 1 else "solid",
                has_band=len(columns) <= 2,
                spread=curves.spread if index == 0 else None,
            )
        if curves.held_out is not None:
            color = RUN_COLORS[number] if len(runs) > 1 else ORANGE
            traces += points(rows, "eval_updates", curves.held_out, f"{prefix}held-out", color)
    if not traces:
        return None
    note = curves.note if is_short else ""
    return Chart(
        curves.title,
        traces,
        curves.y,
        note=note,
        percent=curves.percent,
        from_zero=curves.from_zero,
        is_scientific=curves.is_scientific,
    )
