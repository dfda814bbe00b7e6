"""Names of a run's checkpoints, read without torch: the launcher tells how to resume."""

from __future__ import annotations

import re
from pathlib import Path

PHASES = ("warmup", "sft", "dpo", "kto", "rl")
"""Phases of all jobs, in order."""
FOLDER = "checkpoints"
RECORD = "job.json"
NAME = re.compile(rf"({'|'.join(PHASES)})-(\d{{6,}})")


def checkpoint_order(path: Path) -> tuple[int, int] | None:
    """Order of the phase, and step, of a checkpoint by its name; None for other paths, such as partial checkpoints."""
    match = NAME.fullmatch(path.name)
    return (PHASES.index(match[1]), int(match[2])) if match and (path / RECORD).is_file() else None


def advise_resuming(folder: Path) -> str:
    """How to continue the run in `folder` after it was stopped."""
    saved = (path for path in (folder / FOLDER).glob("*") if checkpoint_order(path) is not None)
    last = max(saved, key=lambda path: checkpoint_order(path) or (0, 0), default=None)
    if last is None:
        return "No checkpoint was written: the job starts again from the beginning (`save_steps` writes checkpoints)"
    return f"{last} is complete: resume with resume_from_checkpoint=true"
