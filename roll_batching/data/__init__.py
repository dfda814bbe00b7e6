"""Samples and how they move: ragged batches, exchange between ranks, prompts, membership."""

from __future__ import annotations

from roll_batching.data.fields import FieldKind, FieldSpec, Schema
from roll_batching.data.movement import collect, distribute
from roll_batching.data.samples import SampleBatch
from roll_batching.data.table import LengthTable, gather_lengths, number_globally

__all__ = [
    "FieldKind",
    "FieldSpec",
    "LengthTable",
    "SampleBatch",
    "Schema",
    "collect",
    "distribute",
    "gather_lengths",
    "number_globally",
]
