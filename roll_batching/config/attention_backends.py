"""The attention backends that a configuration may call by name.

One of anybody's own is named by its dotted path, `package.module:MyBackend` (see `packing.attention_backend`).
"""

from __future__ import annotations

from dataclasses import dataclass

from roll_batching.errors import ConfigError
from roll_batching.registry import Entry, Registry

AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class AttentionEntry(Entry):
    """One attention backend."""

    default_for: tuple[str, ...] = ()
    """Types of devices on which `auto` takes it."""


ATTENTION_BACKENDS: Registry[AttentionEntry] = Registry(
    "attention backend",
    AttentionEntry(
        name=AUTO,
        target="roll_batching.config.attention_backends:default_entry",
        summary="`dense` on the CPU, `varlen` on CUDA",
    ),
    AttentionEntry(
        name="dense",
        target="roll_batching.modeling.attention.dense:DenseBackend",
        summary="torch's scaled_dot_product_attention over buckets of similar sequences; every device and precision",
        default_for=("cpu",),
    ),
    AttentionEntry(
        name="varlen",
        target="roll_batching.modeling.attention.varlen:VarlenBackend",
        summary="torch's variable-length flash attention; CUDA, bf16 and fp16",
        default_for=("cuda",),
    ),
)


def default_entry(device_type: str) -> AttentionEntry:
    """What `auto` stands for on a type of device. Raises `ConfigError` where there is no default."""
    for entry in ATTENTION_BACKENDS:
        if device_type in entry.default_for:
            return entry
    raise ConfigError(f"no attention backend is the default on {device_type}: name one, or your own")
