"""Helpers for passes of a model over a step's samples: log-probs, result fields, and errors on all ranks alike."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np

from roll_batching.errors import RollBatchingError
from roll_batching.planning import Plan
from roll_batching.samples import LengthTable, SampleBatch
from roll_batching.samples.fields import ROUTED_EXPERTS
from roll_batching.strategy import MegatronInferStrategy
from roll_batching.strategy.roles import agree_on_plan

T = TypeVar("T")
Pass = Callable[[SampleBatch, Plan], SampleBatch]
"""Computes fields of a rank's samples: `(samples, plan) -> results`, with the ids of the samples. Collective."""


def log_prob_pass(model: MegatronInferStrategy, masks: Sequence[str] | None, *, experts: bool = False) -> Pass:
    """Computes `log_probs` on the tokens of `masks`; with `experts` also `routed_experts`, the routers' choices."""
    if not experts:
        return lambda samples, plan: model.compute_log_probs(samples, plan, masks=masks)
    return lambda samples, plan: model.forward(samples, plan, ("log_probs", ROUTED_EXPERTS), masks)


def add_results(batch: SampleBatch, results: SampleBatch, names: Mapping[str, str]) -> SampleBatch:
    """Adds fields of `results` to `batch`, with samples in the same order; `names` maps field names to new names."""
    fields = {new: results[name] for name, new in names.items()}
    return batch.with_fields(fields, {new: results.schema[name] for name, new in names.items()})


def ordered_table(model: MegatronInferStrategy, batch: SampleBatch) -> LengthTable:
    """Gathers the length table, sorted by id: plans must not depend on which rank generated a sample. Collective."""
    table = model.gather_table(batch)
    return table.select(np.argsort(table.ids))


# ---- failures on all ranks together


def agree_on_each(strategy: MegatronInferStrategy, plans: Iterator[T]) -> Iterator[T]:
    """Yields `plans`, of equal number on all ranks, each through `agree_on_plan`."""
    while (plan := agree_on_plan(strategy, lambda: next(plans, None))) is not None:
        yield plan


@contextlib.contextmanager
def prefix_errors(role: str) -> Iterator[None]:
    """Prefixes errors of this package with `role`: "the model's outputs" alone could be of any model."""
    try:
        yield
    except RollBatchingError as error:
        raise type(error)(f"{role}: {error}") from error.__cause__
