"""Samples and how they move: ragged batches, exchange between ranks, prompts, membership."""

from __future__ import annotations

from roll_batching.data.fields import FieldKind, FieldSpec, Schema
from roll_batching.data.samples import SampleBatch

__all__ = ["FieldKind", "FieldSpec", "SampleBatch", "Schema"]
