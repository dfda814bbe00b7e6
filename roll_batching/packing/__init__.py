"""Packing: packed tensors and PackedSeqParams from a plan and samples, and results back to samples."""

from roll_batching.packing.attention_backend import AttentionBackend, AttentionRequirements, attention_backend
from roll_batching.packing.batch import PackedBatch, StepPacks, pack_step, unpack_results
from roll_batching.packing.pack_layout import PackLayout
from roll_batching.packing.params import PackedParams, packed_params

__all__ = [
    "AttentionBackend",
    "AttentionRequirements",
    "PackLayout",
    "PackedBatch",
    "PackedParams",
    "StepPacks",
    "attention_backend",
    "pack_step",
    "packed_params",
    "unpack_results",
]
