"""Models of which a part is trained: LoRA adapters on a frozen model, or all modules but the frozen ones.

Adapters are written and read as a directory in PEFT's format: `adapter_config.json`, `adapter_model.safetensors`.
Source: peft 0.17 for the names of files, keys and tensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from roll_batching.distributed import consensus, exchange
from roll_batching.distributed.groups import gather_shards
from roll_batching.errors import CheckpointError, LayoutError, first_of
from roll_batching.huggingface.directory import directory_of, read_json
from roll_batching.huggingface.families import rules_of
from roll_batching.modeling.adapters import global_name, require_embedding_gradients
from roll_batching.modeling.head import gpt_of
from roll_batching.modeling.pretrained import family_of
from roll_batching.settings.model import ModelArgs
from roll_batching.strategy.checkpoint_files import alone, describe_cause
from roll_batching.strategy.checkpoint_folder import atomic_folder, write_text
from roll_batching.strategy.model_state import AdapterState, ModelState
from roll_batching.strategy.weights import gather_parameters

_FREEZING = "freezing modules"
_EMBEDDING = "embedding.word_embeddings.weight"
_ENCODER = {"vision_model": "visual"}
"""ROLL's name of a vision encoder, and ours."""


def prepare_partial_training(state: ModelState, model: ModelArgs, seed: int, *, weights: bool) -> ModelState:
    """`state` with adapters or frozen modules, as `model` says; `weights`: whether it has its weights. Collective.

    Raises `RankError` on all ranks: adapters are not supported for a layer, or a prefix names no parameter.
    """
    if model.lora_target is None:
        freeze_modules(state, model.freeze_module_prefix or ())
        return state
    from roll_batching.modeling.adapters import attach_adapters  # few models have adapters

    with consensus(state.layout.host_group, "making adapters"):
        for chunk in state.chunks:
            attach_adapters(chunk, model, seed)
        if (source := model.model_name_or_path) is not None and state.architecture is not None:
            _require_projections(state, source)
    adapters = AdapterState(
        targets=model.lora_target,
        rank=model.lora_rank,
        alpha=model.lora_scale * model.lora_rank,
        base=model.model_name_or_path,
        base_is_loaded=weights,
    )
    state = replace(state, adapters=adapters)
    if weights and model.adapter_name_or_path is not None:
        from roll_batching.strategy.partial_training import load_adapters

        assert model.model_name_or_path is not None  # `AdapterArgs` checks it
        load_adapters(state, model.model_name_or_path, model.adapter_name_or_path)
    return state


def freeze_modules(state: ModelState, prefixes: Sequence[str]) -> None:
    """Freezes the parameters whose names in the whole model begin with one of `prefixes`. Collective."""
    matched: set[str] = set()
    trained = 0
    for gpt in map(gpt_of, state.chunks):
        for local, parameter in gpt.named_parameters():
            # Under a pipeline the last stage has a copy of tied embeddings as its head.
            is_tied_head = gpt.share_embeddings_and_output_weights and local == "output_layer.weight"
            name = _EMBEDDING if is_tied_head else global_name(gpt, local)
            if fitting := [prefix for prefix in prefixes if name.startswith(_ENCODER.get(prefix, prefix))]:
                matched.update(fitting)
                parameter.requires_grad_(False)
                if local == _EMBEDDING:
                    require_embedding_gradients(gpt)
            trained += parameter.requires_grad
    per_rank = exchange(state.layout.host_group, _FREEZING, lambda: (matched, trained))
    everywhere = {prefix for of_rank, _ in per_rank for prefix in of_rank}
    with consensus(state.layout.host_group, _FREEZING):
        if missing := [prefix for prefix in prefixes if prefix not in everywhere]:
            raise LayoutError(
                f"freeze_module_prefix: no parameter begins with {', '.join(map(repr, missing))}. Names begin with "
                "embedding, decoder.layers.N (N counts the layers of the whole model), decoder.final_layernorm, "
                "output_layer or, in models that take images, visual"
            )
        if not any(count for _, count in per_rank):
            raise LayoutError("freeze_module_prefix freezes every parameter, so that nothing is trained: name fewer")


# ---- adapters as a directory


CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_WRITING, _READING = "writing adapters", "reading adapters"
_FIXED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "fan_in_fan_out": (False, None),
    "use_rslora": (False, None),
    "use_dora": (False, None),
    "lora_bias": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "modules_to_save": (None, []),
    "layers_to_transform": (None, []),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, []),
    "layer_replication": (None, []),
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),  # others change the frozen weights, too
}
"""Keys of `adapter_config.json` that change what an adapter computes, and the values that it has here."""
_KNOWN = (
    *("r", "lora_alpha", "target_modules", "lora_dropout", "inference_mode", "task_type", "auto_mapping", "revision"),
    *("base_model_name_or_path", "peft_version", "exclude_modules", "layers_pattern", "qalora_group_size"),
    *("megatron_config", "megatron_core", "loftq_config", "eva_config", "corda_config", "ensure_weight_tying"),
)
"""Keys that are checked elsewhere, or change nothing in the adapters of a directory."""
_SHOWN = 4


class _Matrix(NamedTuple):
    """A or B of one projection on this rank."""

    name: str
    """Name in PEFT's files."""
    values: torch.Tensor
    axis: int | None
    """The axis that the tensor-parallel ranks of `group` share; None: each has the whole matrix."""
    group: Any
    is_first_replica: bool


def export_adapters(
    state: ModelState, source: str, path: str | Path, *, replaces: Callable[[Path], bool] = lambda path: False
) -> None:
    """Writes the adapters into the folder `path`, under the names of the model directory `source`. Collective.

    Rank 0 holds all adapters in host memory. `path`, on a file system that all ranks share, appears once it is
    complete; an existing folder is replaced where `replaces(path)` is true.

    Raises `RankError` on all ranks: `path` holds something else, a family stores experts together, or a rank could not
    write.
    """
    group = state.layout.host_group
    with consensus(group, _WRITING):
        adapters = _require_adapters(state)
        matrices = list(_matrices(state, source))
    gather_parameters(state.chunks)
    with atomic_folder(path, group, what=_WRITING, replaces=replaces) as folder:
        with alone(_WRITING):
            owned = {}
            for matrix in matrices:
                if matrix.is_first_replica and (full_matrix := _gather(matrix)) is not None:
                    owned[matrix.name] = full_matrix
            parts: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
            dist.gather_object(owned, parts, dst=0, group=group)
        with consensus(group, _WRITING):
            if parts is not None:
                _write(folder, adapters, source, {name: tensor for part in parts for name, tensor in part.items()})


@torch.no_grad()
def load_adapters(state: ModelState, source: str, path: str) -> None:
    """Reads the adapters of the PEFT directory `path` into a model that came from the directory `source`. Collective.

    Raises `RankError` on all ranks, before a parameter changes: the directory has adapters of another kind, rank, scale
    or target, or tensors that are missing, unknown or of another shape.
    """
    from safetensors import safe_open

    group, folder = state.layout.host_group, Path(path)
    with consensus(group, _READING):
        _check_config(folder, _require_adapters(state))
        matrices = list(_matrices(state, source))
    names = {name for of_rank in exchange(group, _READING, lambda: [m.name for m in matrices]) for name in of_rank}
    with consensus(group, _READING):
        try:
            file: Any = safe_open(folder / WEIGHTS, framework="pt")
            stored = set(file.keys())
            slices = {matrix.name: file.get_slice(matrix.name) for matrix in matrices if matrix.name in stored}
            shapes = {name: tuple(stored_slice.get_shape()) for name, stored_slice in slices.items()}
        except Exception as error:  # safetensors raises its own classes
            raise CheckpointError(f"{folder / WEIGHTS} cannot be read: {describe_cause(error)}") from None
        problems = [f"{name} is missing" for name in sorted(names - stored)]
        problems += [f"{name} is unknown" for name in sorted(stored - names)]
        problems += [
            f"{matrix.name} is {list(shapes[matrix.name])}, not {list(_whole_shape(matrix))}"
            for matrix in matrices
            if matrix.name in shapes and shapes[matrix.name] != _whole_shape(matrix)
        ]
        if problems:
            cure = "Choose adapters of this model in adapter_name_or_path"
            raise CheckpointError(
                f"the adapters in {folder} do not fit the model: {first_of(problems, _SHOWN)}. {cure}"
            )
    with consensus(group, _READING):
        parts = [slices[matrix.name][_local_part(matrix)] for matrix in matrices]
        for matrix, part in zip(matrices, parts, strict=True):
            if not bool(torch.isfinite(part).all()):
                raise CheckpointError(f"{matrix.name} in {folder / WEIGHTS} holds NaN or infinities: export it again")
    for matrix, part in zip(matrices, parts, strict=True):
        matrix.values.copy_(part)


def _require_adapters(state: ModelState) -> AdapterState:
    if state.adapters is None:
        raise CheckpointError("the model has no adapters: set model_args.lora_target, or use export")
    return state.adapters


def _require_projections(state: ModelState, source: str) -> None:
    """Raises `LayoutError` for adapters of experts that `source` stores in one tensor, for which PEFT has none."""
    rules = rules_of(family_of(directory_of(source), state.own_family), state.architecture)
    for gpt in map(gpt_of, state.chunks):
        for path, layer in gpt.named_modules():
            if hasattr(layer, "adapter") and rules[global_name(gpt, f"{path}.weight")].is_stacked:
                raise LayoutError(
                    f"lora_target names projections of experts, and {source} stores all experts of a layer in one "
                    "tensor, for which PEFT has no adapters: leave gate_proj, up_proj and down_proj out"
                )


def _matrices(state: ModelState, source: str) -> Iterator[_Matrix]:
    """Yields this rank's shard of A and of B of every adapter."""
    assert state.architecture is not None  # `initialize` makes adapters, of built models only
    rules = rules_of(family_of(directory_of(source), state.own_family), state.architecture)
    for gpt in map(gpt_of, state.chunks):
        for path, layer in gpt.named_modules():
            adapter = getattr(layer, "adapter", None)
            if adapter is None:
                continue
            name = global_name(gpt, f"{path}.weight")
            rule, groups = rules[name], gpt.pg_collection
            theirs = dict(zip(adapter.names, (name for name, _ in rule.theirs), strict=True))
            replicas = groups.expt_dp if layer.is_expert else groups.dp_cp
            for part in adapter.parts:
                module = f"base_model.model.{theirs[part].removesuffix('.weight')}"
                axes = (1, None) if adapter.is_row_parallel else (None, 0)
                for side, values, axis in zip("AB", (adapter.a(part), adapter.b(part)), axes, strict=True):
                    key = f"{module}.lora_{side}.weight"
                    yield _Matrix(key, values, axis, layer.tp_group, replicas.rank() == 0)


def _gather(matrix: _Matrix) -> torch.Tensor | None:
    """The whole matrix on the first of its tensor-parallel ranks, on the host; None on the others."""
    local, rank, ranks = matrix.values.detach().contiguous(), matrix.group.rank(), matrix.group.size()
    if ranks == 1 or matrix.axis is None:
        return local.cpu() if rank == 0 else None
    shards = gather_shards(local, matrix.group)
    return None if shards is None else torch.cat(shards, matrix.axis).cpu()


def _whole_shape(matrix: _Matrix) -> tuple[int, ...]:
    ranks = matrix.group.size()
    return tuple(n * ranks if axis == matrix.axis else n for axis, n in enumerate(matrix.values.shape))


def _local_part(matrix: _Matrix) -> tuple[slice, ...]:
    rank = matrix.group.rank()
    return tuple(
        slice(rank * n, (rank + 1) * n) if axis == matrix.axis else slice(0, n)
        for axis, n in enumerate(matrix.values.shape)
    )


def _write(folder: Path, adapters: AdapterState, source: str, tensors: dict[str, torch.Tensor]) -> None:
    """Writes the adapters' `tensors`, by PEFT's names, and the `adapter_config.json` that PEFT reads."""
    from safetensors.torch import save_file

    modules = sorted({name.split(".")[-3] for name in tensors})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": source,
        "r": adapters.rank,
        "lora_alpha": adapters.alpha,
        "lora_dropout": 0.0,
        "target_modules": modules,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "init_lora_weights": True,
        "inference_mode": True,
    }
    write_text(folder / CONFIG, json.dumps(config, indent=2) + "\n")
    try:
        save_file({name: tensor.contiguous() for name, tensor in sorted(tensors.items())}, folder / WEIGHTS)
    except Exception as error:  # safetensors raises its own classes
        raise CheckpointError(f"{folder / WEIGHTS} cannot be written: {describe_cause(error)}") from None


def _check_config(folder: Path, adapters: AdapterState) -> None:
    """Raises `CheckpointError` unless the PEFT directory has adapters as the model computes them."""
    config = read_json(folder / CONFIG)
    problems = [
        f"{key} is {config.get(key)!r}, and {name} is {value:g}"
        for key, name, value in (("r", "lora_rank", adapters.rank), ("lora_alpha", "lora_alpha", adapters.alpha))
        if config.get(key) != value
    ]
    problems += [
        f"{key} is {config[key]!r}, and adapters here have {allowed[0]!r}"
        for key, allowed in _FIXED.items()
        if key in config and config[key] not in allowed
    ]
    unknown = sorted(key for key in config if key not in _FIXED and key not in _KNOWN and config[key])
    problems += [f"{key} is {config[key]!r}, a key that is unknown here: leave it out" for key in unknown[:_SHOWN]]
    if config.get("peft_type") is None:
        problems.append("peft_type is missing")
    if problems:
        cure = "Set model_args as for these adapters, or choose others in adapter_name_or_path"
        raise CheckpointError(f"{folder / CONFIG} does not fit model_args: {'; '.join(problems)}. {cure}")
