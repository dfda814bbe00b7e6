"""Checkpoints of a model and its training state: saved in one parallel layout, loaded in any other.

A checkpoint is a folder: Megatron's distributed checkpoint of weights and optimizer state, and `strategy.json` with
everything that is not a tensor.
"""

from __future__ import annotations

import importlib.util
import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from roll_batching.distributed import consensus, digest, exchange
from roll_batching.errors import CheckpointError, first_of
from roll_batching.modeling.head import gpt_of
from roll_batching.strategy.adapter_checkpoint import (
    check_adapters,
    check_base_digests,
    describe_adapters,
    without_base,
)
from roll_batching.strategy.checkpoint_files import (
    alone,
    check_files,
    describe_cause,
    explain_read_errors,
    hide_future_warnings,
    load_tensors,
    read_common,
)
from roll_batching.strategy.checkpoint_folder import MANIFEST, RECORD, REPLACED, SAVING, atomic_folder, check_manifest
from roll_batching.strategy.checkpoint_writer import CheckpointWriter, bytes_of, check_free_space
from roll_batching.strategy.model_state import ModelState, TrainingState
from roll_batching.strategy.optimizer_state import (
    check_optimizer,
    grad_scaler_state,
    partial_stacks,
    prepare_optimizer,
    restore_optimizer,
    sharded_optimizer,
)
from roll_batching.strategy.weights import gather_parameters

logger = logging.getLogger(__name__)

LOADING = "loading a checkpoint"
EXTRA = "._extra_state"
"""Suffix of TransformerEngine's FP8 state. It is not saved: FP8 is refused, and without it local and TransformerEngine
layers have the same checkpoints."""
_MAY_CHANGE = ("init_std", "hidden_dropout", "max_position_embeddings", "aux_loss_coeff", "z_loss_coeff")
"""Settings of an architecture that may change between saving and loading: no tensor depends on them."""
_SHOWN = 6
"""Number of differences that an error lists."""


def check_saving(model: ModelState) -> None:
    """Raises `CheckpointError` if this model cannot be saved anywhere."""
    # psutil is not a dependency of megatron-core; without it 0.16 waits forever for writer processes that have died.
    if importlib.util.find_spec("psutil") is None:
        raise CheckpointError(
            "psutil is not installed, and Megatron's checkpoint writer hangs or fails without it: pip install psutil"
        )
    if model.optimizer is not None:
        check_optimizer(model.optimizer)


def save_state(model: ModelState, path: str | Path, *, manifest: bool = True) -> None:
    """Writes the checkpoint folder `path`. Collective; see `MegatronInferStrategy.save`."""
    with atomic_folder(path, model.layout.host_group) as folder:
        write_state(model, folder, manifest=manifest).finish()


def write_state(
    model: ModelState, folder: Path, *, background: bool = False, manifest: bool = True
) -> CheckpointWriter:
    """Starts writing a checkpoint into the empty `folder`; call `finish` on the result. Collective.

    With `background` the tensors are copied to host memory and written while the caller continues.
    """
    group = model.layout.host_group
    with consensus(group, SAVING):
        check_saving(model)
    gather_parameters(model.chunks)
    # Steps and loss scale. On the ranks of a frozen stage they are 0 and empty.
    optimizer = model.optimizer
    progress = exchange(
        group,
        SAVING,
        lambda: (0, {}) if optimizer is None else (prepare_optimizer(optimizer), grad_scaler_state(optimizer)),
    )
    tensors = _sharded_tensors(model, model.optimizer, SAVING, loading=False)
    if scaler := next((scaler for _, scaler in progress if scaler), None):
        tensors.setdefault("optimizer", {})["grad_scaler"] = scaler
    needed = _check_shards(tensors, group, SAVING)
    adapters, training = describe_adapters(model, group), model.training
    with consensus(group, SAVING):
        record: dict[str, Any] = {
            "architecture": _architecture(model),
            "adapters": adapters,
            "dtype": str(model.dtype).removeprefix("torch."),
            "layout": model.layout.to_dict(),
            "optimizer": None,
            "manifest": manifest,
        }
        if training is not None and training.optimizer is not None:
            record["optimizer"] = {
                "steps": max(steps for steps, _ in progress),
                "skipped_steps": training.skipped_steps,
                "schedule_steps": getattr(training.scheduler, "num_steps", None),
            }
        record_text = json.dumps(record, indent=1) + "\n"
        if dist.get_rank() == 0:
            check_free_space(folder, needed)
    return CheckpointWriter(tensors, record_text, folder, group, size=needed, background=background, manifest=manifest)


def load_state(model: ModelState, path: str | Path, *, optimizer: bool, verify: bool = True) -> ModelState:
    """`model` with the weights, and with `optimizer` the training state, of a checkpoint. Collective.

    Weights, moments and schedule change in place; see `MegatronInferStrategy.load`.
    """
    group = model.layout.host_group
    optimizer = optimizer and model.training is not None
    with consensus(group, LOADING) as facts:
        path = Path(path)
        record = _read_record(path)
        facts.equal(f"the file {RECORD}", digest(json.dumps(record)), "All ranks load the same checkpoint")
        facts.equal("whether the optimizer is loaded", optimizer)
        check_files(path)
        _check_architecture(model, record, path)
        check_adapters(model, record.get("adapters"), path)
        if optimizer:
            check_saving(model)
            if record["optimizer"] is None:
                raise CheckpointError(
                    f"{path} holds a model without optimizer state: load it with optimizer=False, which starts from "
                    "its weights with a fresh optimizer"
                )
    with consensus(group, LOADING):  # the ranks share the digests, which needs the one path agreed on above
        if record.get("manifest") or (path / MANIFEST).exists():
            check_manifest(path, rank=dist.get_rank(group), ranks=dist.get_world_size(group), verify=verify)
        elif "manifest" not in record and dist.get_rank() == 0 and not (path.parent / RECORD).is_file():
            logger.warning(
                "%s has no %s: an earlier version wrote it, so that changes of its files cannot be detected",
                path,
                MANIFEST,
            )
    if verify:
        check_base_digests(model, record.get("adapters"), path, group)
    gather_parameters(model.chunks)
    training = model.training if optimizer else None
    loaded_optimizer = None if training is None else training.optimizer
    with consensus(group, LOADING):
        if loaded_optimizer is not None:
            prepare_optimizer(loaded_optimizer)
    tensors = _sharded_tensors(model, loaded_optimizer, LOADING, loading=True)
    _check_shards(tensors, group, LOADING)
    unread = ("mtp.",) if _leaves_heads(model) else ()
    _check_tensors(tensors, path, group, optimizer=loaded_optimizer is not None, unread=unread)
    with hide_future_warnings():
        loaded, failed = load_tensors(tensors, path)
    with consensus(group, LOADING):
        if failed is not None:
            raise failed
        for index, chunk in enumerate(model.chunks):
            gpt = gpt_of(chunk)
            weights = loaded[f"model{index}"]
            # TransformerEngine's state, and weights that came from a model directory.
            unsaved = {name: value for name, value in gpt.state_dict().items() if name not in weights}
            gpt.load_state_dict({**unsaved, **weights})
        if training is not None and loaded_optimizer is not None:
            restored = _restore_training(training, loaded.get("optimizer", {}), record["optimizer"])
            model = replace(model, training=restored)
        elif model.optimizer is not None:
            model.optimizer.reload_model_params()  # else the next step would undo the load from its fp32 copies
    return model


# ---- sharded state


def model_shards(model: ModelState) -> Iterator[Any]:
    """This rank's weights as Megatron's ShardedTensors, whose names do not depend on the layout."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    yield from (shard for shard in _shards(_sharded_weights(model)) if isinstance(shard, ShardedTensor))


def _sharded_tensors(model: ModelState, optimizer: Any, what: str, *, loading: bool) -> dict[str, Any]:
    """Weights and state of the prepared optimizer as shards of global tensors, named alike in all layouts. Collective.

    `what` is the operation, for errors on all ranks.
    """
    group = model.layout.host_group
    with consensus(group, what):
        weights = _sharded_weights(model)
        state = {key: without_base(model, part) for key, part in weights.items()}
    if optimizer is not None:
        stacks = partial_stacks(optimizer, weights, group, what)
        with consensus(group, what) if loading else alone(what):
            shards = sharded_optimizer(optimizer, weights, stacks, loading=loading)
        state |= {"optimizer": shards} if shards else {}
    return state


def _sharded_weights(model: ModelState) -> dict[str, Any]:
    """The sharded state of each chunk, with the weights that checkpoints leave out."""
    from megatron.core import parallel_state

    groups = model.pg_collection
    data = parallel_state.get_data_parallel_group(with_context_parallel=True) if groups is None else groups.dp_cp
    metadata = {
        "dp_cp_group": data,
        "chained_optim_avoid_prefix": True,
    }
    return {
        f"model{index}": {
            name: piece
            for name, piece in gpt_of(chunk).sharded_state_dict(metadata=dict(metadata)).items()
            if not name.endswith(EXTRA)
        }
        for index, chunk in enumerate(model.chunks)
    }


def _restore_training(training: TrainingState, loaded: dict[Any, Any], record: dict[str, Any]) -> TrainingState:
    scheduler = training.scheduler
    restore_optimizer(training.optimizer, loaded, record["steps"])
    if scheduler is not None and record["schedule_steps"] is not None:
        scheduler.num_steps = record["schedule_steps"]
        scheduler.step(0)
    return replace(training, skipped_steps=record["skipped_steps"])


# ---- checks


def _architecture(model: ModelState) -> dict[str, Any] | None:
    """The architecture settings that must match on loading, or None for a model that the caller built."""
    if model.architecture is None:
        return None
    return {**_without_changeable(model.architecture.model_dump(mode="json")), "value_head": model.value_head}


def _without_changeable(settings: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_changeable(value) if isinstance(value, dict) else value
        for key, value in settings.items()
        if key not in _MAY_CHANGE
    }


def _read_record(path: Path) -> dict[str, Any]:
    """The content of `strategy.json` in the checkpoint `path`. Raises `CheckpointError` if there is none."""
    file = path / RECORD
    if not path.is_dir():
        previous = path.with_name(path.name + REPLACED)
        cure = (
            f"a save was interrupted, and {previous} holds the one before it: load that checkpoint"
            if previous.is_dir()
            else "check the path"
        )
        raise CheckpointError(f"there is no checkpoint {path}: {cure}")
    if not file.is_file():
        raise CheckpointError(f"{path} is not a checkpoint of a strategy: it has no {RECORD}; name a folder with one")
    with explain_read_errors(file):
        record: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(record, dict) or not {"architecture", "optimizer"} <= record.keys():
            raise CheckpointError(f"{file} is malformed: it has no architecture or no optimizer; copy it again")
    return record


def _check_architecture(model: ModelState, record: dict[str, Any], path: Path) -> None:
    """Raises `CheckpointError` if the checkpoint's model has other sizes or parts than `model`, as far as known."""
    saved, current = record["architecture"], _architecture(model)
    if saved is None or current is None:
        return
    saved = {"value_head": False, **saved}  # versions before 0.2 had none
    saved, current = (  # None and 0 both mean no heads
        {**settings, "mtp_num_layers": settings.get("mtp_num_layers") or 0} for settings in (saved, current)
    )
    ignored = {"mtp_num_layers"} if _leaves_heads(model) else set()
    differing = [
        f"{key} is {saved[key]} there and {current[key]} here"
        for key in current.keys() - ignored
        if key in saved and saved[key] != current[key]
    ]
    if differing:
        cure = "Set model_args.architecture as it was"
        if saved["value_head"] != current["value_head"]:
            cure = "A critic's checkpoint is the folder `critic` of a job's, and a policy's the folder around it"
        raise CheckpointError(f"the checkpoint {path} is of another model: {first_of(differing, _SHOWN)}. {cure}")


def _leaves_heads(model: ModelState) -> bool:
    """Whether the heads of multi-token prediction in a checkpoint are not loaded: the model does not train."""
    return not model.heads and model.training is None


def _check_tensors(state: dict[str, Any], path: Path, group: Any, *, optimizer: bool, unread: tuple[str, ...]) -> None:
    """Raises `RankError` on all ranks if names or shapes of the checkpoint's tensors differ from the model's."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    def local_tensors() -> tuple[dict[str, tuple[int, ...] | None], dict[str, tuple[int, ...]]]:
        read_common(path)
        expected: dict[str, tuple[int, ...] | None] = {}
        for shard in _shards(state):
            if isinstance(shard, ShardedTensor):  # a vocabulary padded for another layout has another size
                expected[shard.key] = None if shard.allow_shape_mismatch else tuple(shard.global_shape)
        stored = {
            tensor.key: tuple(tensor.global_shape)
            for tensor in dist_checkpointing.load_tensors_metadata(str(path)).values()
            if (optimizer or not tensor.key.startswith("optimizer.")) and not tensor.key.startswith(unread)
        }
        return expected, stored

    tensors_by_rank = exchange(group, LOADING, local_tensors)
    expected = {key: shape for of_rank, _ in tensors_by_rank for key, shape in of_rank.items()}
    stored = tensors_by_rank[0][1]
    problems: list[str] = []
    for key in sorted(expected.keys() | stored.keys()):
        if key not in stored:
            problems.append(f"{key} is missing there")
        elif key not in expected:
            problems.append(f"{key} {list(stored[key])} is not in the model here")
        elif (shape := expected[key]) is not None and shape != stored[key]:
            problems.append(f"{key} is {list(stored[key])} there and {list(shape)} here")
    with consensus(group, LOADING):
        if problems and all(problem.startswith("optimizer.") for problem in problems):
            raise CheckpointError(
                f"the checkpoint {path} has the state of another optimizer, or of other trained parameters: "
                f"{first_of(problems, _SHOWN)}. Set training_args.optimizer and freeze_module_prefix as they were, "
                "or load it with optimizer=False, which starts a fresh optimizer"
            )
        if problems:
            cure = "Build the model that it was saved from"
            raise CheckpointError(f"the checkpoint {path} does not fit: {first_of(problems, _SHOWN)}. {cure}")


def _check_shards(state: dict[str, Any], group: Any, what: str) -> int:
    """Bytes of a checkpoint over all ranks. Raises `RankError` on all unless the shards make whole tensors. Collective.

    Megatron's own call of this check raises on rank 0 alone, inside collectives in which the other ranks then wait.
    """
    from megatron.core.dist_checkpointing.mapping import ShardedBase
    from megatron.core.dist_checkpointing.validation import validate_sharding_integrity

    def local_shards() -> tuple[list[Any], int]:
        shards = [shard for shard in _shards(state) if isinstance(shard, ShardedBase)]
        return [shard.without_data() for shard in shards], bytes_of(shards)

    shards_by_rank = exchange(group, what, local_shards)
    with consensus(group, what):
        try:
            validate_sharding_integrity([shards for shards, _ in shards_by_rank])
        except Exception as error:
            raise CheckpointError(
                f"the shards of all ranks do not make whole tensors (`sharded_state_dict` of a module): "
                f"{describe_cause(error)}"
            ) from None
    return sum(size for _, size in shards_by_rank)


def _shards(state: dict[str, Any]) -> Iterator[Any]:
    """The leaves of a sharded state, with factories replaced by the shards that they build."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    for item in _leaves(state):
        yield from _leaves(item.build()) if isinstance(item, ShardedTensorFactory) else (item,)


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, (list, tuple)):
        for item in tree:
            yield from _leaves(item)
    else:
        yield tree
