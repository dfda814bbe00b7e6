"""Shapes of models and rates of clusters, by name or from files, and the predicted times of packs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from roll_batching.errors import ConfigError, PlanError
from roll_batching.jobs.config import JobConfig, load_config
from roll_batching.jobs.config.diagnostics import Problem
from roll_batching.jobs.config.yaml_source import read_yaml
from roll_batching.planning import ParallelDims
from roll_batching.planning.pack_times import Cluster, PackTimes
from roll_batching.settings import ArchitectureConfig
from roll_batching.settings.cluster_file import read_cluster_file, with_rates
from roll_batching.settings.model import describe_model
from roll_batching.settings.model_cost import architecture_pack_times

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
    """The shape of the model `name`: a key of `MODELS`, a Hugging Face directory, or a YAML file.

    The file has the keys of the shape, or is that of a job, whose `actor_train` counts. Raises `ConfigError`.
    """
    if name in MODELS:
        return ArchitectureConfig.model_validate(MODELS[name])
    if Path(name).suffix.lower() in (".yaml", ".yml"):
        data = read_yaml(name).data
        return job_architecture(load_config(name)) if "actor_train" in data else _validated(data, name)
    described = describe_model(name)
    if described is None:
        raise ConfigError(
            f"--model {name!r} is neither a model directory here nor in Hugging Face's cache: give one with a "
            f"config.json, a YAML file (.yaml) with hidden_size, num_layers and the like, or one of {', '.join(MODELS)}"
        )
    if described.problems:
        raise ConfigError(f"--model {name}: {'; '.join(described.problems)}")
    return _validated(described.architecture, name)


def job_architecture(config: JobConfig) -> ArchitectureConfig:
    """The shape of a job's `actor_train`, heads of multi-token prediction as its layout has them.

    Raises `ConfigError` where it is not known.
    """
    train = config.actor_train
    if train.model_args.architecture is None:
        text = "is missing: a simulation needs the model's shape: write it, or set model_name_or_path to a directory"
        raise config.error(Problem(("actor_train", "model_args", "architecture"), text))
    return train.model_args.architecture_to_build(train.strategy_args.strategy_config.mtp_num_layers)


def _validated(values: Any, name: str) -> ArchitectureConfig:
    try:
        return ArchitectureConfig.model_validate(values)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()]
        raise ConfigError(f"{name} is not the shape of a model: {'; '.join(problems)}") from None


def architecture_times(
    shape: ArchitectureConfig, dims: ParallelDims, cluster: Cluster, *, overlapped_exchange: bool = False
) -> PackTimes:
    """Predicted times of packs of a model of this `shape`."""
    times = architecture_pack_times(shape, dims, cluster=cluster)
    return replace(times, overlapped_exchange=overlapped_exchange)


def check_layout(shape: ArchitectureConfig, dims: ParallelDims) -> None:
    """Raise `PlanError` where the model does not divide into the parts of a layout."""
    chunks = dims.pp_size * dims.vpp_size
    if shape.num_layers % chunks:
        raise PlanError(
            f"{shape.num_layers} layers do not divide into pp {dims.pp_size} x vpp {dims.vpp_size} = {chunks} chunks: "
            "change pp or vpp"
        )
    if shape.num_attention_heads % dims.tp_size:
        heads = shape.num_attention_heads
        raise PlanError(f"{heads} attention heads do not divide into tp {dims.tp_size} parts: change tp")
    if shape.kv_heads % dims.tp_size and dims.tp_size % shape.kv_heads:
        raise PlanError(f"{shape.kv_heads} key and value heads do not divide into tp {dims.tp_size} parts: change tp")
    if dims.ep_size > 1 and (shape.moe is None or shape.moe.num_experts % dims.ep_size):
        experts = "no experts" if shape.moe is None else f"{shape.moe.num_experts} experts"
        raise PlanError(f"the model has {experts}, which do not divide into ep {dims.ep_size} parts: change ep")


# ---- clusters


CLUSTERS: Mapping[str, Cluster] = {
    "h100": Cluster(),
    "a100": Cluster(
        matmul_rate=0.60 * 312e12, attention_rate=0.42 * 312e12, node_bandwidth=200e9, network_bandwidth=21e9
    ),
}
"""Estimates, not measurements. a100: the H100's shares of the peak rates of its datasheet, 200 Gb/s per device."""


def read_cluster(*texts: str) -> Cluster:
    """Builds a cluster from texts: a name in `CLUSTERS`, a YAML file (`read_cluster_file`), or KEY=VALUE.

    Each text changes the result of the texts before it, the first one the H100's rates. Raises `ConfigError` for
    unknown names and for values in another unit.
    """
    cluster = Cluster()
    for text in texts:
        key, equals, value = text.partition("=")
        if text in CLUSTERS:
            cluster = CLUSTERS[text]
        elif _is_file(text):
            cluster = with_rates(cluster, read_cluster_file(text).rates, text)
        elif equals:
            try:
                rate = int(value) if value.isdecimal() else float(value)
            except ValueError:
                raise ConfigError(f"--cluster {text!r}: {value!r} is not a number") from None
            cluster = with_rates(cluster, {key: rate}, "--cluster")
        else:
            raise ConfigError(
                f"--cluster {text!r} is not known: choose one of {', '.join(CLUSTERS)}, or a YAML file (.yaml) with "
                "rates such as matmul_rate: 5.9e14; or write KEY=VALUE, such as matmul_rate=5.9e14"
            )
    return cluster


def describe_cluster(*texts: str) -> str:
    """Where the rates of `read_cluster(*texts)` come from."""
    names = ", ".join(str(read_cluster_file(text)) if _is_file(text) else text for text in texts or ("h100",))
    return names if any(map(_is_file, texts)) else f"{names}, whose rates are estimates"


def _is_file(text: str) -> bool:
    return "=" not in text and Path(text).suffix.lower() in (".yaml", ".yml")
