"""The task of one rehearsed rank, its phases, and its report."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from roll_batching.jobs.config import JobConfig

PREFILL, DECODING, COMPACTION = ROLLOUT = ("rollout prefill", "rollout decoding", "rollout compaction")
LOG_PROBS, REFERENCE, TEACHER = "old log-probs", "reference", "teacher"
MISMATCHED, MISMATCHED_REFERENCE = "mismatched log-probs", "mismatched reference"
"""Passes of the policy and of the reference over mismatched answers, which give the reference point of KTO."""
GRADIENTS = ("inputs", "forward", "backward", "gradient sync", "optimizer")
"""Phases of a training pass."""
VALUES = "values"
CRITIC = "critic "
"""Prefix of the names of the critic's phases and kinds of memory."""
EXPERT_COUNT_READS = "moe/token_dispatcher.py"
"""File in which dropless Megatron reads the token counts from the device, once per layer and pass."""
CRITIC_GRADIENTS = tuple(f"{CRITIC}{phase}" for phase in GRADIENTS)


@dataclass(frozen=True, kw_only=True)
class RankTask:
    """One rank of a job, to be rehearsed in its own process."""

    config: JobConfig
    rank: int
    world_size: int
    cp_size: int = 1
    """Context-parallel size of the rehearsed packs, where each pack has its own."""
    layers: int | None = None
    """Layers of the rehearsed model; None: all layers of the job's model."""
    device: Literal["cuda", "cpu"] = "cuda"
    lengths: tuple[int, ...] | None = None
    """Tokens of the samples of an optimizer step; None: samples as long as the job allows."""
    micro_batches: int | None = None
    """Per rank and pass; None: enough to fill the pipeline and start the next one."""
    expert_imbalance: float = 1.0
    """Tokens of this rank's experts, as a multiple of an equal share."""
    timeline: bool = False
    """Whether the report includes memory over time, for a plot."""


@dataclass(frozen=True, kw_only=True)
class PhasePeak:
    """Peak memory of a phase."""

    phase: str
    bytes: float
    kinds: dict[str, float] = field(default_factory=dict)
    """Bytes by kind: weights, gradients, optimizer, those of the critic, reference, teacher, inputs, activations."""
    holders: dict[str, float] = field(default_factory=dict)
    """Bytes of activations by module and tensor."""


@dataclass(frozen=True, kw_only=True)
class TrainingBatch:
    """The rehearsed training micro-batch, and its optimizer step."""

    samples: int
    model_flops: float
    """Model FLOPs of the real tokens, forward and backward, on all ranks that compute the micro-batch."""
    padding: float
    """Share of padding among the tokens of the step, or of the micro-batch if lengths are unknown."""
    in_step: int | None
    """Micro-batches of a replica in an optimizer step, or packs of the rehearsed size where each pack has its own; None
    if lengths are unknown."""


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """Memory, FLOPs, collectives and host reads of one rank."""

    rank: int
    stage: int
    parameters: float
    """Number of parameters on this rank."""
    kept: dict[str, float]
    """Persistent bytes by kind: they stay from step to step."""
    peaks: dict[str, PhasePeak]
    """By phase."""
    flops: dict[str, float]
    """FLOPs by phase, of the rehearsed micro-batches."""
    collectives: dict[str, tuple[float, float]]
    """Calls and their total bytes, by "phase / group / name"."""
    host_reads: dict[str, int]
    """Calls by "phase: place"."""
    micro_batches: int
    """Per pass, as rehearsed."""
    tokens: dict[str, int]
    """Tokens of the rehearsed micro-batch, by pass."""
    seconds: float
    training: TrainingBatch
    layer_weights: float = 0
    """Number of weights of linear layers that this rank would copy in FP8; weights of frozen models count half."""
    critic: TrainingBatch | None = None
    """The critic's micro-batch; None without a critic."""
    notes: tuple[str, ...] = ()
    """Assumptions, such as balanced routing."""
    timeline: tuple[tuple[str, dict[str, float]], ...] = ()
    """Phase and bytes by kind, at moments evenly spaced in operations."""
