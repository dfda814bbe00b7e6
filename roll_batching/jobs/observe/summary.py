"""Closing tables of a run: held-out metrics before and after, throughput, tokens under other batching modes."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from roll_batching.jobs.observe.metrics_file import Metrics
from roll_batching.jobs.observe.numbers import fixed

MODES = (
    ("full", "padded to the longest length allowed"),
    ("padded", "padded to the longest of the mini-batch"),
    ("dynamic", "dynamic batching"),
    ("packed", "sequence packing"),
)


_NOT_SHOWN = ("eval_updates", "eval_samples")


def summarize(rows: Sequence[Metrics]) -> dict[str, float]:
    """Summary of a run's `rl` rows (or, without any, of its other rows).

    Held-out metrics before and after: `reward_before` and `reward_after`, the same for every mark's share and for the
    reward where the mark is set (`mark/x_before`, `reward_with/x_before`, ...); of supervised runs `loss_before`,
    `loss_after` and the loss's metrics. Then `tokens` (real tokens trained on), `shared_tokens` of them,
    `train_seconds`, `tokens_per_second`, and `tokens_<mode>`, computed tokens of the same steps in each mode. Metrics
    without values are left out.
    """
    phase_rows = [r for r in rows if r["phase"] == "rl"] or list(rows)
    evaluated = [r for r in phase_rows if r.get("eval_updates") is not None]
    summary: dict[str, float] = {}
    if evaluated:
        for when, row in (("before", evaluated[0]), ("after", evaluated[-1])):
            for key, value in row.items():
                if key.startswith("eval_") and key not in _NOT_SHOWN and value is not None:
                    summary[f"{key.removeprefix('eval_')}_{when}"] = value
    for key in ("tokens", "shared_tokens", "train_seconds", *(f"tokens_{mode}" for mode, _ in MODES)):
        values = [r[key] for r in phase_rows if r.get(key) is not None]
        if values:
            summary[key] = sum(values)
    if summary.get("train_seconds"):
        summary["tokens_per_second"] = summary["tokens"] / summary["train_seconds"]
    return summary


def show_summary(summary: dict[str, float], console: Console, *, used: str, title: str) -> None:
    """Print the closing tables. `used` is the batching mode of the run."""
    table = Table(title=title, title_justify="left", title_style="bold", show_header=True, header_style="bold")
    table.add_column("held-out problems" if "reward_after" in summary else "held-out texts")
    for column in ("before", "after", "change"):
        table.add_column(column, justify="right")
    for name in _evaluated(summary):
        before, after = summary[f"{name}_before"], summary[f"{name}_after"]
        digits = 1 if max(abs(before), abs(after)) > 10 else 3
        change = fixed(after - before, digits, sign=True)
        table.add_row(_label(name), fixed(before, digits), fixed(after, digits), change)
    if table.row_count:
        console.print(table)

    tokens = Table(title_justify="left", show_header=True, header_style="bold")
    tokens.add_column("tokens that the same training steps compute")
    for column in ("tokens", "of them padding", "against padded"):
        tokens.add_column(column, justify="right")
    reference = summary.get("tokens_padded")
    for mode, label in MODES:
        computed = summary.get(f"tokens_{mode}")
        if computed is not None:
            tokens.add_row(
                label + (" (this run)" if mode == used else ""),
                f"{computed:,.0f}",
                f"{1 - summary['tokens'] / computed:.1%}",
                f"{computed / reference:.2f} x" if reference else "",
            )
    if tokens.row_count:
        console.print(tokens)
    if "tokens_per_second" in summary:
        console.print(
            f"{summary['tokens']:,.0f} real tokens trained on, {summary['tokens_per_second']:,.0f} tokens per second"
        )
    if shared := summary.get("shared_tokens"):
        share = shared / summary["tokens"]
        console.print(f"{shared:,.0f} of them ({share:.0%}) are common prefixes that another sample computed")


def _evaluated(summary: dict[str, float]) -> list[str]:
    names = [key.removesuffix("_before") for key in summary if key.endswith("_before")]
    return [name for name in names if f"{name}_after" in summary]


def _label(name: str) -> str:
    kind, _, of = name.partition("/")
    words = of.replace("_", " ")
    known = {
        "mark": f"share of answers: {words}",
        "reward_with": f"reward, {words}: yes",
        "reward_without": f"reward, {words}: no",
        "reward": f"reward: {of}",  # of a domain
    }
    return known[kind] if of and kind in known else name.replace("_", " ")
