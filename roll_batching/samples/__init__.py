"""Samples and how they move: ragged batches, exchange between ranks, which of them share an optimizer step."""

from __future__ import annotations

from roll_batching.samples.batch import SampleBatch
from roll_batching.samples.fields import FieldKind, FieldSpec, Schema
from roll_batching.samples.membership import MiniBatches, mini_batches, rank_slice
from roll_batching.samples.movement import collect, distribute
from roll_batching.samples.table import LengthTable, gather_bins, gather_lengths, number_globally

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
    "gather_lengths",
    "mini_batches",
    "number_globally",
    "rank_slice",
]
