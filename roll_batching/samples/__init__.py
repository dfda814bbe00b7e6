"""Ragged sample batches, their exchange between ranks, and their division into mini-batches."""

from __future__ import annotations

from roll_batching.samples.all_to_all import collect, distribute
from roll_batching.samples.batch import SampleBatch
from roll_batching.samples.fields import FieldKind, FieldSpec, Schema
from roll_batching.samples.length_table import (
    LengthTable,
    find_shared_prefixes,
    gather_bins,
    gather_lengths,
    number_globally,
)
from roll_batching.samples.mini_batching import MiniBatches, mini_batches, rank_slice

__all__ = [
    "FieldKind",
    "FieldSpec",
    "LengthTable",
    "MiniBatches",
    "SampleBatch",
    "Schema",
    "collect",
    "distribute",
    "gather_bins",
    "find_shared_prefixes",
    "gather_lengths",
    "mini_batches",
    "number_globally",
    "rank_slice",
]
