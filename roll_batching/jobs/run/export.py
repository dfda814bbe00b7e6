"""The trained model of a run as a Hugging Face directory: at the run's end, or later from one of its checkpoints."""

from __future__ import annotations

from pathlib import Path

from roll_batching.jobs.config import JobConfig
from roll_batching.jobs.run.checkpoint import SavedPoint
from roll_batching.jobs.run.saved_model import open_checkpoint
from roll_batching.jobs.run_folder import MODEL, folder_of
from roll_batching.strategy import MegatronInferStrategy


def export_at_the_end(config: JobConfig, strategy: MegatronInferStrategy) -> Path | None:
    """Writes the model of a run that is over into its folder, where the run started from a model directory. Collective.

    Returns where it lies; None where there is nothing to write.
    """
    if not config.export_model or config.actor_train.model_args.model_name_or_path is None:
        return None
    path = folder_of(config) / MODEL
    strategy.export(path, replaces=lambda path: True)  # what this run left when it ended before
    return path


def export_run(run: Path, to: Path, pretrain: str | None = None) -> SavedPoint:
    """Writes the model of a run's last checkpoint, or of the checkpoint `run`, into the folder `to`; by one process.

    `pretrain` is the model directory that the run started from, where it lies elsewhere by now. Returns the checkpoint.
    Raises what `open_checkpoint` and `MegatronInferStrategy.export` raise.
    """
    model = open_checkpoint(run, pretrain, runs=False)
    model.strategy.export(to)
    return model.point
