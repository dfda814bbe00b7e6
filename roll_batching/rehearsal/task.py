"""What one process rehearses, and what it tells."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from roll_batching.jobs.config import JobConfig

PREFILL, DECODING, COMPACTION = ROLLOUT = ("rollout prefill", "rollout decoding", "rollout compaction")
LOG_PROBS, REFERENCE = "old log-probs", "reference"
GRADIENTS = ("inputs", "forward", "backward", "gradient sync", "optimizer")
"""Phases of a step; those of training."""


@dataclass(frozen=True, kw_only=True)
class RankTask:
    """One rank of a pretended world, and the passes that it makes."""

    job: JobConfig
    rank: int
    world_size: int
    layers: int | None = None
    """Transformer layers of each of the rank's chunks; None: as many as the model has."""
    device: Literal["cuda", "cpu"] = "cuda"
    lengths: tuple[int, ...] | None = None
    """Of the samples of an optimizer step; None: as long as the job allows."""
    micro_batches: int | None = None
    """Per rank and pass; None: as many as show all that happens."""
    expert_imbalance: float = 1.0
    """How many times its share of the tokens the experts of this rank get, where there are experts."""
    timeline: bool = False
    """Whether the report has one: for a picture."""


@dataclass(frozen=True, kw_only=True)
class PhasePeak:
    """Where memory is highest in a phase."""

    phase: str
    bytes: float
    kinds: dict[str, float] = field(default_factory=dict)
    """By kind of thing."""
    holders: dict[str, float] = field(default_factory=dict)
    """Of activations: by module and tensor."""


@dataclass(frozen=True, kw_only=True)
class TrainingBatch:
    """The micro-batch of training that is rehearsed, and the step that it stands for."""

    samples: int
    model_flops: float
    """Of the model for its real tokens, forward and backward, on all ranks of a replica."""
    padding: float
    """Share of the tokens that are not real: of the step where its lengths are known, else of the micro-batch."""
    in_step: int | None
    """Micro-batches of a replica in an optimizer step; None where lengths are not known."""


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """What one rank's passes came to; bytes and FLOPs of that rank."""

    rank: int
    stage: int
    parameters: float
    """Of this rank."""
    kept: dict[str, float]
    """Bytes that stay from step to step, by kind."""
    peaks: dict[str, PhasePeak]
    """By phase."""
    flops: dict[str, float]
    """By phase, of the rehearsed micro-batches."""
    collectives: dict[str, tuple[float, float]]
    """By "phase / group / name": calls, and bytes of all calls."""
    host_reads: dict[str, int]
    """By "phase: place", how often."""
    micro_batches: int
    """Per pass, as rehearsed."""
    tokens: dict[str, int]
    """By pass, of the rehearsed micro-batch."""
    seconds: float
    training: TrainingBatch
    notes: tuple[str, ...] = ()
    """What was taken for granted."""
    timeline: tuple[tuple[str, dict[str, float]], ...] = ()
    """Moments of the step at equal distances in operations: phase, and bytes by kind."""
