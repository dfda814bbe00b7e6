"""The runs of a check: what each changes against the first one, how it places the samples, and its outcome."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from roll_batching.samples import SampleBatch

PACKS = 4
REFERENCE = "reference"

Bins = list[list[list[int]]]
"""Samples by data-parallel rank and micro-batch."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One run: its name says what it changes."""

    name: str
    bins: Bins
    mode: str = "packed"
    hint: str = ""
    """What usually makes a loss depend on it."""


@dataclass(frozen=True, kw_only=True)
class LayoutRuns:
    """Runs that share processes and a parallel layout."""

    scenarios: tuple[Scenario, ...]
    processes: int = 1
    strategy_config: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Request:
    """A loss, its samples and the runs."""

    loss: bytes
    """Pickled: each run has a new copy, so that none sees the state that another left."""
    samples: SampleBatch
    layouts: tuple[LayoutRuns, ...]
    seed: int
    seconds: float
    """Longest time of the runs of one layout."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of one run."""

    loss: float = 0.0
    metrics: dict[str, float] | None = None
    gradients: dict[str, torch.Tensor] | None = None
    error: str | None = None
    """Instead of a result."""


_MICRO_BATCHES = (
    "a mean over the tensor that the loss sees, or a metric of the wrong kind: reduce with the view's mean, "
    "sequence_mean or sample_mean, and return Mean(numerator, denominator)"
)
_ORDER = "a state between calls, or an assumption about neighbouring samples"


def scenarios(units: Sequence[Sequence[int]]) -> list[LayoutRuns]:
    """All runs over samples in `units`, at least `PACKS` groups that stay in one micro-batch each.

    Each run changes one thing against the first. Packs have different numbers of samples.
    """
    packs = _uneven(units)
    reference = [packs]
    one_process = (
        Scenario(name=REFERENCE, bins=reference),
        Scenario(name="nothing: the same step again", bins=reference, hint="random numbers, or a state between calls"),
        Scenario(name=f"1 micro-batch instead of {PACKS}", bins=[[[i for p in packs for i in p]]], hint=_MICRO_BATCHES),
        Scenario(
            name=f"{len(units)} micro-batches instead of {PACKS}", bins=[[list(u) for u in units]], hint=_MICRO_BATCHES
        ),
        Scenario(name="the order of the micro-batches", bins=[packs[::-1]], hint=_ORDER),
        Scenario(name="the order of the samples in a micro-batch", bins=[[pack[::-1] for pack in packs]], hint=_ORDER),
        Scenario(
            name="padded instead of packed",
            bins=reference,
            mode="padded",
            hint="a sum over all positions of a tensor: filler counts in it; use the view's masks and reductions",
        ),
    )
    return [
        LayoutRuns(scenarios=one_process),
        LayoutRuns(
            scenarios=(
                Scenario(
                    name="tensor parallel size 2",
                    bins=reference,
                    hint="logits are shards of the vocabulary: reduce them with view.vocabulary. An all-reduce of "
                    "torch.distributed.nn multiplies gradients",
                ),
            ),
            processes=2,
            strategy_config={"tensor_model_parallel_size": 2, "sequence_parallel": True},
        ),
        LayoutRuns(
            scenarios=(
                Scenario(
                    name="context parallel size 2",
                    bins=reference,
                    hint="ranks add up their parts of a sequence_loss, or compute one loss: return sums over positions "
                    "(or set gather_cp = True)",
                ),
                Scenario(
                    name="context parallel size 2, padded",
                    bins=reference,
                    mode="padded",
                    hint="as for context parallelism, and for padding",
                ),
            ),
            processes=2,
            strategy_config={"context_parallel_size": 2},
        ),
        LayoutRuns(
            scenarios=(
                Scenario(
                    name="data parallel size 2",
                    bins=[packs[0::2], packs[1::2]],
                    hint="counts of one rank: num_tokens, num_sequences and total count all ranks",
                ),
            ),
            processes=2,
        ),
    ]


def _uneven(units: Sequence[Sequence[int]]) -> list[list[int]]:
    """`PACKS` packs of the samples of `units`: each takes about half of the rest, so that sizes differ."""
    packs, rest = [], list(units)
    for left in range(PACKS - 1, -1, -1):
        count = len(rest) if left == 0 else max((len(rest) - left + 1) // 2, 1)
        packs.append([sample for unit in rest[:count] for sample in unit])
        rest = rest[count:]
    return packs
