"""Options shared by the commands that open a checkpoint."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from roll_batching.errors import RollBatchingError

Checkpoint = Annotated[Path, typer.Option(help="Folder of a run, whose last checkpoint is opened; or a checkpoint.")]
Pretrain = Annotated[str | None, typer.Option(help="Model directory that the run started from, if it has moved since.")]
Prompts = Annotated[
    list[Path] | None,
    typer.Option(help="JSONL file of prompts with the run's keys; repeatable. Default: the held-out file."),
]


def require_torch(task: str) -> None:
    """Raises RollBatchingError if torch is not installed; `task` is the subject of its message."""
    if importlib.util.find_spec("torch") is None:
        raise RollBatchingError(f"{task} needs torch and megatron-core: pip install 'roll-batching[megatron,hf]'")
