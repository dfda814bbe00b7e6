"""What the commands that open a checkpoint share."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from roll_batching.errors import RollBatchingError

Checkpoint = Annotated[Path, typer.Option(help="Folder of a run, for its last checkpoint; or a checkpoint.")]
Pretrain = Annotated[
    str | None, typer.Option(help="The model directory that the run started from, where it lies elsewhere by now.")
]
Prompts = Annotated[
    list[Path] | None,
    typer.Option(help="JSONL file of prompts, in the run's own keys; may be given again. Default: the held-out file."),
]


def require_torch(what: str) -> None:
    """Raises RollBatchingError where torch is not installed."""
    if importlib.util.find_spec("torch") is None:
        raise RollBatchingError(f"{what} needs torch and megatron-core: pip install 'roll-batching[megatron,hf]'")
