"""`roll-batching export RUN --to DIR`: a run's model as a Hugging Face directory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from roll_batching.commands.checkpoints import Pretrain, require_torch


def export(
    run: Annotated[Path, typer.Argument(help="Folder of a run, for its last checkpoint; or a checkpoint.")],
    to: Annotated[Path, typer.Option(help="Folder to write; it is not there yet.")],
    pretrain: Pretrain = None,
) -> None:
    """Write a run's model as a Hugging Face directory, in the names and precisions of the one that it started from.

    One process does it, on the CPU: the whole model must fit into its memory.
    """
    require_torch("exporting")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch is imported
    from roll_batching.jobs.run.export import export_run

    point = export_run(run, to, pretrain)
    typer.echo(f"wrote the model of {point.path} (phase {point.phase}, step {point.step}) into {to}")
