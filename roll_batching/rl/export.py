"""The trained model of a run as a Hugging Face directory: at the run's end, or later from one of its checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

from roll_batching.config import JobConfig, MegatronConfig, WorkerConfig, load_config
from roll_batching.errors import CheckpointError
from roll_batching.rl.checkpoint import SavedPoint, saved_point
from roll_batching.rl.folder import CONFIG, MODEL, folder_of
from roll_batching.strategy import MegatronInferStrategy
from roll_batching.strategy.checkpoint import RECORD
from roll_batching.strategy.checkpoint_files import reading

_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float64": "fp64"}


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
    Raises CheckpointError when there is none, and what `MegatronInferStrategy.load` and `export` raise.
    """
    point = saved_point(run)
    if point is None:
        raise CheckpointError(
            f"{run} holds no checkpoint: name a run's folder that has some (save_steps), or a checkpoint. A run that "
            f"ended has written its model into the folder {MODEL} beside them"
        )
    strategy = MegatronInferStrategy(_on_one_process(point, pretrain))
    strategy.initialize(weights=False)
    strategy.load(point.path, optimizer=False)
    strategy.export(to)
    return point


def _on_one_process(point: SavedPoint, pretrain: str | None) -> WorkerConfig:
    """The role that was trained, in a layout of one process and in the precision of its weights."""
    role = load_config(point.path.parents[1] / CONFIG).actor_train
    file = point.path / RECORD
    with reading(file):
        dtype = _DTYPES[json.loads(file.read_text(encoding="utf-8"))["dtype"]]
    changes = {"dtype": dtype} | ({} if pretrain is None else {"model_name_or_path": pretrain})
    strategy = role.strategy_args.model_copy(update={"strategy_config": MegatronConfig()})
    model = role.model_args.model_copy(update=changes)
    return role.model_copy(update={"strategy_args": strategy, "model_args": model, "device_mapping": None})
