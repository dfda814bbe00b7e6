"""Check of a weight update: the engine's log-probs of a few tokens against the trainer's.

An engine can report success and keep a weight: vLLM's CPU backend did so with a tied output head. Only what the engine
computes shows which weights it has.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from roll_batching.distributed import exchange
from roll_batching.errors import EngineError
from roll_batching.samples import SampleBatch
from roll_batching.strategy import MegatronInferStrategy
from roll_batching.strategy.roles import run_on

_TOKENS, _SEED = 32, 0
_SMALLEST_LIMIT = 1e-4
"""A limit derived from the first gap is at least this: a first gap of nearly 0 says nothing about later rounding."""
_LARGEST_FP32, _LARGEST_BF16, _LARGEST_FP8 = 1e-3, 0.05, 0.1
"""Largest gaps that rounding explains, by the trainer's precision. Measured in bf16: 0.011 (docs/results.md)."""
_GROWTH = 4.0
"""A gap may be this many times the first one, which shows the rounding of both sides' dtypes."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Tokens, and the trainer's log-probs of all but the first, at temperature 1."""

    tokens: list[int]
    log_probs: list[float]
    largest_gap: float
    """Largest median difference of log-probs that rounding in the trainer's precision explains."""

    def gap(self, log_probs: Sequence[float]) -> float:
        """The median difference of an engine's `log_probs`; no mean, as mixtures of experts may have outliers.

        Raises EngineError for log-probs of another number of tokens.
        """
        if len(log_probs) != len(self.log_probs):
            raise EngineError(f"it sent {len(log_probs)} log-probs for a prompt of {len(self.tokens)} tokens")
        return statistics.median(abs(ours - theirs) for ours, theirs in zip(self.log_probs, log_probs, strict=True))


def make_probe(strategy: MegatronInferStrategy) -> Probe:
    """Makes the probe of the strategy's current weights, the same on all ranks. Collective.

    Its tokens are drawn from the vocabulary with a fixed seed, as many as a micro-batch may have.
    """
    layout, limits = strategy.layout, strategy.constraints(forward=True)
    count = min(_TOKENS, *(size for size in (limits.max_tokens, limits.padded_length) if size is not None))
    tokens = np.random.default_rng(_SEED).integers(0, strategy.state.vocab_size, count).tolist()
    # One sample per data-parallel rank, as a rank without one would compute a filler.
    local_batch = SampleBatch.from_lists({"input_ids": [tokens]}, {"input_ids": "token"}, ids=[layout.dp_rank])
    previous = strategy.temperature, strategy.temperature_field
    strategy.temperature, strategy.temperature_field = 1.0, None  # of the log-probs that engines have of a prompt
    try:
        values = run_on(strategy, local_batch, strategy.compute_log_probs)["log_probs"].tolist()
    finally:
        strategy.temperature, strategy.temperature_field = previous
    log_probs = exchange(layout.host_group, "the probe of a weight update", lambda: values)[0][: count - 1]
    largest_gap = _LARGEST_FP32 if strategy.dtype in (torch.float32, torch.float64) else _LARGEST_BF16
    is_fp8 = strategy.settings.pack_multiple > 1
    return Probe(tokens=tokens, log_probs=log_probs, largest_gap=_LARGEST_FP8 if is_fp8 else largest_gap)


class GapLimit:
    """The largest gap of a probe that rounding explains, from the first gap of a run and the trainer's precision."""

    def __init__(self) -> None:
        self._limit: float | None = None

    def check(self, gap: float, largest: float) -> None:
        """Raises EngineError when rounding does not explain `gap`; `largest`: what it explains in this precision."""
        limit = self._limit or min(max(_GROWTH * gap, _SMALLEST_LIMIT), largest)
        if not gap <= limit:  # not `gap > limit`, which is false for nan
            raise EngineError(
                f"it has other weights than were sent: its log-probs of a probe differ from the trainer's by "
                f"{gap:.2g} in the median, and rounding explains {limit:.2g}. "
                "Look at its log for tensors that it did not load. A server in another dtype than the trainer's "
                "(model_args.dtype), or with quantization, rounds more: start it with the same"
            )
        self._limit = limit
