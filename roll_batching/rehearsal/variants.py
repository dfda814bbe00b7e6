"""Jobs that differ in a few settings: what one could change so that a job fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from roll_batching.config import JobConfig

_LAYOUT = "strategy_args.strategy_config."
_ROLES = ("actor_train", "reference")
CAPS = {
    "packed": "sequence_packing_args.max_packed_sequence_length_train",
    "dynamic": "max_tokens_per_microbatch_in_train",
    "padded": "training_args.per_device_train_batch_size",
}
"""What bounds a training micro-batch, by mode: tokens, or in padded mode rows."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """Settings of actor_train, by dotted path below the role; a layout is every role's."""

    settings: Mapping[str, Any]

    def __str__(self) -> str:
        """As overrides on the command line."""
        return " ".join(f"actor_train.{path}={_word(value)}" for path, value in self.settings.items())

    def of(self, job: JobConfig) -> JobConfig:
        """`job`, changed."""
        for path, value in self.settings.items():
            for role in _ROLES if path.startswith(_LAYOUT) else _ROLES[:1]:
                if getattr(job, role) is not None:
                    job = with_value(job, f"{role}.{path}", value)
        return job


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def with_value(settings: Any, path: str, value: Any) -> Any:
    """A copy of pydantic settings with another value at a dotted path."""
    first, _, rest = path.partition(".")
    return settings.model_copy(update={first: with_value(getattr(settings, first), rest, value) if rest else value})


def cap_of(job: JobConfig) -> tuple[str, int]:
    """What bounds a training micro-batch: its path below actor_train, and its value."""
    spec = job.actor_train.batching().train
    return CAPS[spec.mode], (spec.rows or 1) if spec.mode == "padded" else (spec.max_tokens or 1)


def ways_out(job: JobConfig, world_size: int) -> list[Change]:
    """Changes that save memory and leave results as they are, the cheapest first."""
    megatron, model = job.actor_train.strategy_args.strategy_config, job.actor_train.model_args.architecture
    assert model is not None
    found: list[dict[str, Any]] = []
    if not megatron.use_distributed_optimizer:
        found.append({"use_distributed_optimizer": True})
    full = {"recompute_granularity": "full"} if megatron.recompute_granularity != "full" else {}
    if full:
        found.append(full)
    tensor, pipeline = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    fits_world = world_size % (2 * megatron.model_size) == 0
    if fits_world and model.kv_heads % (2 * tensor) == 0:
        found.append({"tensor_model_parallel_size": 2 * tensor, "sequence_parallel": True, **full})
    if fits_world and model.num_layers % (2 * pipeline * megatron.vpp_size) == 0:
        found.append({"pipeline_model_parallel_size": 2 * pipeline, **full})
    return [Change(settings={_LAYOUT + key: value for key, value in one.items()}) for one in found]
