"""The section of recorded rollouts: texts and rewards, as data that the page's script shows and filters."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from roll_batching.tools.report.run_files import MOST_ROLLOUTS, RunFiles
from roll_batching.tools.report.sections import Section
from roll_batching.tools.report.text import clean, number

LONGEST_TEXT = 3000
"""Most characters of a prompt or response."""
MOST_CHARACTERS = 6_000_000
"""Most characters of all texts of a run; texts are cut shorter where there are more."""


def rollouts_section(runs: Sequence[RunFiles]) -> Section:
    """The section, or the reason why it is empty."""
    notes, absent = [], []
    for run in runs:
        if run.rollouts is None:
            absent.append(
                f"Rollouts of {run.label}: its folder has no rollouts.jsonl with responses (rollout_samples; "
                "supervised runs have none)."
            )
            continue
        shown, total = len(run.rollouts.objects), run.rollouts.total
        if total > MOST_ROLLOUTS:
            notes.append(
                f"{run.label}: {shown:,} of {total:,} recorded responses are on this page, spread evenly over the file."
            )
        else:
            notes.append(f"{run.label}: {shown:,} recorded responses.")
    notes.append("Runs record some of their responses (rollout_samples of each step), not all.")
    return Section(
        "Rollouts", note=" ".join(notes), has_rollouts=any(run.rollouts is not None for run in runs), absent=absent
    )


def rollout_records(runs: Sequence[RunFiles]) -> list[dict[str, Any]]:
    """One record per response; all texts cleaned."""
    records = []
    for run in runs:
        objects = run.rollouts.objects if run.rollouts is not None else []
        longest = min(LONGEST_TEXT, MOST_CHARACTERS // max(3 * len(objects), 1))
        records += [_record(values, run.label, longest) for values in objects]
    return records


def _record(values: dict[str, Any], label: str, longest: int) -> dict[str, Any]:
    return {
        "run": label,
        **{name: _whole(values.get(name)) for name in ("step", "version", "id", "prompt_tokens", "response_tokens")},
        "kind": clean(values.get("kind", ""), 20),
        "domain": clean(values.get("domain") or "", 60),
        "reward": number(values.get("reward")),
        "failed": values.get("failed") is True,
        "finished": values.get("finished") is True,
        "marks": _marks(values.get("marks")),
        **{name: clean(values.get(name, ""), longest) for name in ("prompt", "response")},
        "answer": clean("" if values.get("answer") is None else values["answer"], min(longest, 500)),
    }


def _whole(value: Any) -> int | None:
    finite = number(value)
    return None if finite is None else int(finite)


def _marks(value: Any) -> str:
    if not isinstance(value, dict):
        return ""
    names = [name for name, mark in list(value.items())[:20] if mark is True]
    others = [
        f"{name}={json.dumps(mark)}"
        for name, mark in list(value.items())[:20]
        if isinstance(mark, int | float) and not isinstance(mark, bool)
    ]
    return clean(", ".join([*names, *others]).replace("_", " "), 200)
