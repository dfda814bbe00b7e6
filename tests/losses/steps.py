"""Helpers for tests of losses: a strategy in a layout, and a step on a batch with its result and gradients."""

from __future__ import annotations

from typing import Any

import torch

CAP = 64
VOCABULARY = 61


def make_strategy(mode: str = "packed", cap: int = CAP, **options: Any) -> Any:
    """An initialised training strategy with weights equal in every layout. Keywords as `worker_config`."""
    from roll_batching.strategy import MegatronTrainStrategy
    from tests.support.models import worker_config

    strategy = MegatronTrainStrategy(worker_config(mode, cap, **options))
    strategy.initialize()
    refill(strategy)
    return strategy


def refill(strategy: Any) -> None:
    from tests.support.models import fill

    fill(strategy.chunks, VOCABULARY, strategy.layout.tp_rank, strategy.layout.tp_size)


def mine(strategy: Any, whole: Any) -> Any:
    """This data-parallel rank's part of a batch."""
    layout = strategy.layout
    return whole.select(torch.arange(layout.dp_rank, len(whole), layout.dp_size))


def step(strategy: Any, whole: Any, loss: Any, plan: Any = None, **plan_options: Any) -> tuple[Any, dict[str, Any]]:
    """Result and unsharded gradients of one step on `whole` (given on all ranks) from the shared weights."""
    from roll_batching.samples import distribute, gather_lengths
    from tests.support.models import whole_gradients

    local = mine(strategy, whole)
    plan = plan or strategy.plan(gather_lengths(local), **plan_options)
    refill(strategy)
    result = strategy.train_step(distribute(local, plan), plan, loss)
    return result, whole_gradients(strategy.chunks, VOCABULARY, strategy.layout.tp_rank, False)


def gap(found: tuple[Any, dict[str, Any]], expected: tuple[Any, dict[str, Any]]) -> tuple[float, float]:
    """Relative differences of loss and gradients (the worst tensor's, norm over norm, and between replicas)."""
    from tests.support.models import worst_difference

    worst = max(worst_difference(found[1], expected[1])[0], found[1]["spread"])
    value, right = (x if isinstance(x, float) else x.loss for x in (found[0], expected[0]))
    return abs(value - right) / max(abs(right), 1e-3), worst
