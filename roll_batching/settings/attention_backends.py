"""Registry of attention backends.

Your own backend is named by its dotted path, `package.module:MyBackend` (see `packing.attention_backend`).
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
    """Device types on which `auto` takes it, unless an earlier entry is installed."""
    because: str = ""
    """Why `auto` prefers it to later entries."""


ATTENTION_BACKENDS: Registry[AttentionEntry] = Registry(
    "attention backend",
    AttentionEntry(
        name=AUTO,
        target="roll_batching.settings.attention_backends:default_entries",
        summary="`dense` on the CPU; on CUDA the first that is installed of `varlen`, `flash_attn` and `dense`; with "
        "`transformer_impl: transformer_engine` that one's",
    ),
    AttentionEntry(
        name="varlen",
        target="roll_batching.modeling.attention.varlen:VarlenBackend",
        summary="torch's variable-length flash attention; CUDA, bf16 and fp16; torch 2.10 or later",
        default_for=("cuda",),
        because="one kernel for a whole pack, and part of torch",
    ),
    AttentionEntry(
        name="flash_attn",
        target="roll_batching.modeling.attention.packages:FlashBackend",
        summary="flash_attn_varlen_func of the package flash-attn; CUDA, bf16 and fp16; flash-attn 2.1 or later",
        default_for=("cuda",),
        because="one kernel for a whole pack, and this torch has none",
    ),
    AttentionEntry(
        name="flash_attn_4",
        target="roll_batching.modeling.attention.packages:FlashFourBackend",
        summary="flash_attn_varlen_func of the package flash-attn-4, which pip installs without a compiler; CUDA of "
        "compute capability 9.0 to 12, bf16 and fp16; not chosen by `auto`, as it was not run on a GPU",
    ),
    AttentionEntry(
        name="transformer_engine",
        target="roll_batching.modeling.attention.packages:EngineBackend",
        summary="TransformerEngine's attention behind its rotation, with its own context parallelism; CUDA, bf16 and "
        "fp16; transformer-engine 2.9 or later",
    ),
    AttentionEntry(
        name="dense",
        target="roll_batching.modeling.attention.dense:DenseBackend",
        summary="torch's scaled_dot_product_attention over buckets of similar sequences; every device and precision",
        default_for=("cpu", "cuda"),
        because="part of every torch, on every device",
    ),
)


def default_entries(device_type: str) -> tuple[AttentionEntry, ...]:
    """Candidates of `auto` on a device type, fastest first. Raises `ConfigError` if there are none."""
    entries = tuple(entry for entry in ATTENTION_BACKENDS if device_type in entry.default_for)
    if not entries:
        raise ConfigError(f"no attention backend is the default on {device_type}: name one, or your own")
    return entries
