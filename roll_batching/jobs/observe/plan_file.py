"""last_plan.json: the plan of a run's latest optimizer step, with its lengths, for the report."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roll_batching.errors import PlanError, RollBatchingError
from roll_batching.files import atomic_file, cause
from roll_batching.planning import Plan

PLAN = "last_plan.json"
MOST_SAMPLES = 20_000
"""Most samples of a plan that is written: a larger one would take longer to write than it is worth after each step."""


@dataclass(frozen=True)
class LastPlan:
    """A plan as the file holds it."""

    phase: str
    step: int
    samples: int
    plan: Plan | None
    """None where it has more than `MOST_SAMPLES` samples."""


def write_plan(folder: Path, plan: Plan, *, phase: str, step: int) -> None:
    """Replace `folder`/last_plan.json. Raises RollBatchingError when it cannot be written."""
    samples = len(plan.lengths)
    content = {
        "phase": phase,
        "step": step,
        "samples": samples,
        "plan": plan.to_dict() if samples <= MOST_SAMPLES else None,
    }
    path = folder / PLAN
    try:
        with atomic_file(path) as partial:
            partial.write_text(json.dumps(content), encoding="utf-8")
    except OSError as error:
        raise RollBatchingError(
            f"{path} cannot be written: {cause(error)}. Free some space or repair the folder, then resume the run"
        ) from error


def read_plan(text: str) -> LastPlan:
    """The content of a last_plan.json. Raises PlanError when it is not one, or holds no valid plan."""
    try:
        content: Any = json.loads(text)
        values = content["plan"]
        plan = None if values is None else Plan.from_dict(values)
        return LastPlan(str(content["phase"]), int(content["step"]), int(content["samples"]), plan)
    except PlanError:
        raise
    except (ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError) as error:
        raise PlanError(f"it holds no plan ({type(error).__name__}: {error})") from None
