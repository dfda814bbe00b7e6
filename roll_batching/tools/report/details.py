"""Sections without charts: overview, held-out results, configuration, environment, notices, recorded rollouts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from roll_batching.jobs.observe.progress import fixed
from roll_batching.tools.report.charts import Section, Table
from roll_batching.tools.report.run_files import MOST_ROLLOUTS, Row, RunFiles, clean, number

_STEPS_OF_PHASES = {
    "rl": "max_steps",
    "warmup": "warmup.training_args.max_steps",
    "sft": "actor_train.training_args.max_steps",
    "dpo": "actor_train.training_args.max_steps",
    "kto": "actor_train.training_args.max_steps",
}
"""Settings that hold the number of steps of a phase."""
_MOST_RESULTS = 40


def overview_section(runs: Sequence[RunFiles]) -> Section:
    """Runs, their phases and recorded steps, and results on held-out data."""
    records = []
    for run in runs:
        phases = []
        for phase in run.phases:
            steps = run.settings.get(_STEPS_OF_PHASES.get(phase, ""), "")
            of_all = f" of {int(steps[:15]):,}" if steps.isascii() and steps.isdigit() else ""
            phases.append(f"{phase}: {max(row.step for row in run.of_phase(phase)):,}{of_all}")
        records.append((run.label, str(run.folder), "; ".join(phases)))
    tables = [Table(("run", "folder", "recorded steps"), records)]
    results = _results(runs)
    return Section("Overview", tables=[*tables, results] if results else tables)


def _results(runs: Sequence[RunFiles]) -> Table | None:
    """First and last held-out values of each run and phase."""
    records = []
    for run in runs:
        for phase in run.phases:
            rows = [row for row in run.of_phase(phase) if "eval_updates" in row.values]
            names = sorted({key for row in rows for key in row.values if key.startswith("eval_")})
            for name in [name for name in names if name not in ("eval_updates", "eval_samples")][:_MOST_RESULTS]:
                records.append((run.label, phase, _label(name), *_first_and_last(rows, name)))
    if not records:
        return None
    return Table(("run", "phase", "held-out", "first", "last", "change"), records, title="Held-out results")


def _first_and_last(rows: Sequence[Row], name: str) -> tuple[str, str, str]:
    """(First value, last value, change) of a held-out column, as texts."""
    evaluations = [row for row in rows if name in row.values]
    first, last = evaluations[0].values[name], evaluations[-1].values[name]
    digits = 1 if max(abs(first), abs(last)) > 10 else 3
    steps = [f"{row.values['eval_updates']:,.0f}" for row in (evaluations[0], evaluations[-1])]
    return (
        f"{fixed(first, digits)} (after {steps[0]} steps)",
        f"{fixed(last, digits)} (after {steps[1]})",
        fixed(last - first, digits, sign=True),
    )


def _label(name: str) -> str:
    name = name.removeprefix("eval_")
    kind, _, rest = name.partition("/")
    known = {
        "mark": "share of responses: {}",
        "reward_with": "reward where {}",
        "reward_without": "reward where not {}",
    }
    return known[kind].format(rest.replace("_", " ")) if rest and kind in known else name.replace("_", " ")


def settings_section(runs: Sequence[RunFiles]) -> Section:
    """Section of the settings in config.yaml; with two runs, differing settings come first."""
    absent = [
        f"Settings of {run.label}: its folder has no config.yaml that can be read." for run in runs if not run.settings
    ]
    table = _compared([run.settings for run in runs], [run.label for run in runs], "setting")
    return Section("Configuration", tables=[table] if table else [], absent=absent)


def environment_section(runs: Sequence[RunFiles]) -> Section:
    """Section of the versions and the device of each run."""
    absent = [
        f"Environment of {run.label}: its folder has no run_info.json, which runs write since version 0.2.0."
        for run in runs
        if not run.environment
    ]
    table = _compared([run.environment for run in runs], [run.label for run in runs], "")
    return Section("Environment", tables=[table] if table else [], absent=absent)


def _compared(values: Sequence[Mapping[str, str]], labels: Sequence[str], head: str) -> Table | None:
    """Table of the values of each run by key, differing ones first; None without keys. `head`: title of the keys."""
    keys = list(dict.fromkeys(key for run_values in values for key in run_values))
    if not keys:
        return None
    if len(values) == 1:
        return Table((head, "value"), [(key, values[0][key]) for key in keys])
    missing = "(none)"
    differ = [key for key in keys if len({run_values.get(key, missing) for run_values in values}) > 1]
    ordered = [*differ, *(key for key in keys if key not in set(differ))]
    title = f"{len(differ):,} of {len(keys):,} differ; they come first"
    records = [(key, *(run_values.get(key, missing) for run_values in values)) for key in ordered]
    return Table((head, *labels), records, title=title, marked=frozenset(range(len(differ))))


def notices_section(runs: Sequence[RunFiles]) -> Section:
    """Notices of the configuration and the logs, findings in the metrics, and files that could not be read."""
    lists = []
    for run in runs:
        prefix = f"{run.label}: " if len(runs) > 1 else ""
        for title, items in (
            ("notices of the configuration and in the logs", run.notices),
            ("found in the metrics", _findings(run)),
            ("files", run.problems),
        ):
            if items:
                lists.append((prefix + title, items))
    return Section("Notices", lists=lists, absent=[] if lists else ["Notices: there are none."])


def _findings(run: RunFiles) -> list[str]:
    """Sentences on faults and rare events that the metrics count."""
    findings = []
    for phase in run.phases:
        rows = run.of_phase(phase)
        for key, is_total, text in (
            ("skipped_steps", True, "optimizer steps were skipped, since their gradient was not finite"),
            ("reward_failures", False, "responses on which the reward failed"),
            ("dropped_samples", False, "samples were too old and were sampled again"),
            ("sampler_restarts", True, "restarts of the sampler"),
            ("fillers", False, "micro-batches without a sample (fillers)"),
        ):
            values = [row.values.get(key, 0.0) for row in rows]
            count = max(values) if is_total else sum(values)
            if count > 0:
                findings.append(f"{phase}: {count:,.0f} {text}.")
    for key in ("loss", "grad_norm"):
        if run.nulls.get(key):
            findings.append(f"{key} is missing or not finite in {run.nulls[key]:,} rows.")
    return findings


# ---- recorded rollouts


LONGEST_TEXT = 3000
"""Most characters of a prompt or response."""
MOST_CHARACTERS = 6_000_000
"""Most characters of all texts of a run; texts are cut shorter where there are more."""


def rollouts_section(runs: Sequence[RunFiles]) -> Section:
    """Section of the recorded responses; names each run without any in `absent`."""
    notes, absent = [], []
    for run in runs:
        if run.rollouts is None:
            absent.append(
                f"Rollouts of {run.label}: its folder has no rollouts.jsonl with responses (rollout_samples; "
                "supervised runs have none)."
            )
            continue
        listed, total = len(run.rollouts.objects), run.rollouts.total
        if total > MOST_ROLLOUTS:
            notes.append(
                f"{run.label}: {listed:,} of {total:,} recorded responses are shown, spread evenly over the file."
            )
        else:
            notes.append(f"{run.label}: {listed:,} recorded responses.")
    notes.append("Runs record some of their responses (rollout_samples of each step), not all.")
    return Section(
        "Rollouts", note=" ".join(notes), has_rollouts=any(run.rollouts is not None for run in runs), absent=absent
    )


def rollout_records(runs: Sequence[RunFiles]) -> list[dict[str, Any]]:
    """One record per response; all texts cleaned."""
    records = []
    for run in runs:
        objects = run.rollouts.objects if run.rollouts is not None else []
        longest = min(LONGEST_TEXT, MOST_CHARACTERS // max(3 * len(objects), 1))  # prompt, response and answer
        records += [_record(values, run.label, longest) for values in objects]
    return records


def _record(values: dict[str, Any], label: str, longest: int) -> dict[str, Any]:
    return {
        "run": label,
        **{
            name: None if (value := number(values.get(name))) is None else int(value)
            for name in ("step", "version", "id", "prompt_tokens", "response_tokens")
        },
        "kind": clean(values.get("kind", ""), 20),
        "domain": clean(values.get("domain") or "", 60),
        "reward": number(values.get("reward")),
        "failed": values.get("failed") is True,
        "finished": values.get("finished") is True,
        "marks": _marks(values.get("marks")),
        **{name: clean(values.get(name, ""), longest) for name in ("prompt", "response")},
        "answer": clean("" if values.get("answer") is None else values["answer"], min(longest, 500)),
    }


def _marks(value: Any) -> str:
    """Text of a reward's marks: names of those that are true, and `name=number` of the others; 20 at most of each."""
    if not isinstance(value, dict):
        return ""
    names = [name for name, mark in list(value.items())[:20] if mark is True]
    others = [
        f"{name}={json.dumps(mark)}"
        for name, mark in list(value.items())[:20]
        if isinstance(mark, int | float) and not isinstance(mark, bool)
    ]
    return clean(", ".join([*names, *others]).replace("_", " "), 200)
