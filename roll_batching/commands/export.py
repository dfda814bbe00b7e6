"""`roll-batching export RUN --to DIR`: write a checkpoint as a Hugging Face directory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from roll_batching.commands.options import Pretrain, require_torch


def export(
    run: Annotated[Path, typer.Argument(help="Folder of a run, whose last checkpoint is exported; or a checkpoint.")],
    to: Annotated[Path, typer.Option(help="Folder to create.")],
    pretrain: Pretrain = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Write the LoRA adapters in PEFT's format, not the model with them added.")
    ] = False,
    push: Annotated[
        str | None, typer.Option(help="Also upload it to this repository of the hub, OWNER/NAME; a new one is private.")
    ] = None,
) -> None:
    """Write a checkpoint as a Hugging Face directory, with the tensor names and dtypes of its initial model.

    Runs on one process on the CPU, whose memory must hold the whole model.
    """
    require_torch("exporting")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch is imported
    from roll_batching.huggingface.hub import HubRepository
    from roll_batching.jobs.run.saved_model import export_checkpoint, write_model_card

    repository = None if push is None else HubRepository(push)  # fails before the export
    point = export_checkpoint(run, to, pretrain, adapter=adapter)
    what = "adapters" if adapter else "model"
    typer.echo(f"wrote the {what} of {point.path} (phase {point.phase}, step {point.step}) into {to}")
    if repository is not None:
        write_model_card(to, point, repository.name)
        repository.upload(to, f"{point.phase}, step {point.step}")
        typer.echo(f"uploaded {to} to {repository.name}")
