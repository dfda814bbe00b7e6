"""Shapes of models: by name, from a model directory, or from a YAML file; their cost and predicted times."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from roll_batching.errors import ConfigError, PlanError
from roll_batching.jobs.config.yaml_source import read_yaml
from roll_batching.planning import ParallelDims
from roll_batching.planning.pack_times import Cluster, PackTimes
from roll_batching.settings import ArchitectureConfig
from roll_batching.settings.model import describe_model
from roll_batching.settings.model_cost import architecture_cost

_QWEN3 = {"num_query_groups": 8, "kv_channels": 128, "vocab_size": 151936, "qk_layernorm": True}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "qwen3-1.7b": {
        "hidden_size": 2048,
        "ffn_hidden_size": 6144,
        "num_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
        **_QWEN3,
    },
    "qwen3-8b": {
        "hidden_size": 4096,
        "ffn_hidden_size": 12288,
        "num_layers": 36,
        "num_attention_heads": 32,
        **_QWEN3,
    },
    "qwen3-32b": {
        "hidden_size": 5120,
        "ffn_hidden_size": 25600,
        "num_layers": 64,
        "num_attention_heads": 64,
        **_QWEN3,
    },
}


def read_architecture(name: str) -> ArchitectureConfig:
    """The shape of the model `name`: a key of `MODELS`, a Hugging Face directory, or a YAML file of the shape's keys.

    Raises `ConfigError`.
    """
    if name in MODELS:
        return ArchitectureConfig.model_validate(MODELS[name])
    if Path(name).suffix.lower() in (".yaml", ".yml"):
        return _validated(read_yaml(name).data, name)
    described = describe_model(name)
    if described is None:
        raise ConfigError(
            f"--model {name!r} is no model directory here: give one with a config.json, a YAML file (.yaml) with "
            f"hidden_size, num_layers and the like, or one of {', '.join(MODELS)}"
        )
    if described.problems:
        raise ConfigError(f"--model {name}: {'; '.join(described.problems)}")
    return _validated(described.architecture, name)


def _validated(values: Any, name: str) -> ArchitectureConfig:
    try:
        return ArchitectureConfig.model_validate(values)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()]
        raise ConfigError(f"{name} is not the shape of a model: {'; '.join(problems)}") from None


def architecture_times(
    shape: ArchitectureConfig, dims: ParallelDims, cluster: Cluster, *, overlapped_exchange: bool = False
) -> PackTimes:
    """Predicted times of packs of such a model."""
    return PackTimes.of_model(
        architecture_cost(shape, tp_size=dims.tp_size),
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        tp_size=dims.tp_size,
        pp_size=dims.pp_size,
        overlapped_exchange=overlapped_exchange,
        cluster=cluster,
    )


def check_layout(shape: ArchitectureConfig, dims: ParallelDims) -> None:
    """Raise `PlanError` where the model does not divide into the parts of a layout."""
    chunks = dims.pp_size * dims.vpp_size
    if shape.num_layers % chunks:
        raise PlanError(
            f"{shape.num_layers} layers do not divide into pp {dims.pp_size} x vpp {dims.vpp_size} = {chunks} chunks"
        )
    if shape.num_attention_heads % dims.tp_size:
        raise PlanError(f"{shape.num_attention_heads} attention heads do not divide into tp {dims.tp_size} parts")
    if shape.kv_heads % dims.tp_size and dims.tp_size % shape.kv_heads:
        raise PlanError(f"{shape.kv_heads} key and value heads do not divide into tp {dims.tp_size} parts")
    if dims.ep_size > 1 and (shape.moe is None or shape.moe.num_experts % dims.ep_size):
        experts = "no experts" if shape.moe is None else f"{shape.moe.num_experts} experts"
        raise PlanError(f"the model has {experts}, which do not divide into ep {dims.ep_size} parts")
