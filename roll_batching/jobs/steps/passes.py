"""Passes of a model over samples of all ranks: plan, distribute, run, collect, with failures on all ranks together.

A user's packing algorithm may fail or hang on one rank alone. Ranks with different plans are found where a plan is
first used (`distribute`, and every pass).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import TypeVar

import numpy as np
import torch

from roll_batching.errors import PlanError, RollBatchingError
from roll_batching.planning import Plan
from roll_batching.samples import LengthTable, SampleBatch, collect, distribute
from roll_batching.samples.fields import ROUTED_EXPERTS
from roll_batching.samples.layout_exchange import LayoutExchange
from roll_batching.strategy import MegatronInferStrategy

T = TypeVar("T")
Pass = Callable[[SampleBatch, Plan], SampleBatch]
"""Computes fields of a rank's samples: `(samples, plan) -> results`, with the ids of the samples. Collective."""
_SHARE_OF_TIMEOUT = 0.8
"""Of `backend_timeout`: a rank whose planning hangs must report it before the others stop waiting."""


def run_on(
    model: MegatronInferStrategy,
    batch: SampleBatch,
    run: Pass,
    home: MegatronInferStrategy | None = None,
    plan: Callable[[], Plan] | None = None,
) -> SampleBatch:
    """Results of `run` for this rank's `batch`, in its order. Collective.

    Args:
        model: plans the pass, for its own parallel layout.
        batch: samples in the layout of `home`.
        run: a pass of `model`.
        home: the strategy whose ranks hold the samples; None: `model`.
        plan: makes the plan if both layouts are equal; by default one for passes without gradient.
    """
    home = home or model
    if home.layout.dims == model.layout.dims:
        if plan is None:
            table = ordered_table(model, batch)
            return run_planned(batch, [agree_on_plan(model, lambda: model.plan(table, forward=True))], run)
        return run_planned(batch, [agree_on_plan(home, plan)], run)
    layout_exchange = LayoutExchange.of(home.layout.dp_rank, model.layout.dp_rank)
    table = model.gather_table(batch)
    crossing = agree_on_plan(model, lambda: model.plan(layout_exchange.in_target(table), forward=True))
    results = run(layout_exchange.distribute(batch, crossing, table), crossing)
    return layout_exchange.collect(results, crossing, table, like=batch)


def run_planned(batch: SampleBatch, plans: Iterable[Plan], run: Pass) -> SampleBatch:
    """Results of `run` with each of `plans`, in the order of `batch`; pad values for samples outside of all plans."""
    parts = [collect(run(distribute(batch, plan), plan), plan, like=batch) for plan in plans]
    computed = SampleBatch.concat(parts)
    missing = batch.select(torch.nonzero(~computed.find(batch.ids)[1])[:, 0])
    padding = {
        name: computed[name].new_full((missing.num_tokens, *computed[name].shape[1:]), spec.pad)
        for name, spec in computed.schema.items()
    }
    filled = SampleBatch(missing.ids, missing.lengths, padding, computed.schema)
    return SampleBatch.concat([computed, filled]).select_ids(batch.ids)


def log_prob_pass(model: MegatronInferStrategy, masks: Sequence[str] | None, *, experts: bool = False) -> Pass:
    """Computes `log_probs` on the tokens of `masks`; with `experts` also `routed_experts`, the routers' choices."""
    if not experts:
        return lambda samples, plan: model.compute_log_probs(samples, plan, masks=masks)
    return lambda samples, plan: model.forward(samples, plan, ("log_probs", ROUTED_EXPERTS), masks)


def add_results(batch: SampleBatch, results: SampleBatch, names: Mapping[str, str]) -> SampleBatch:
    """`batch` with fields of `results`, samples in the same order; `names` maps their names to new ones."""
    fields = {new: results[name] for name, new in names.items()}
    return batch.with_fields(fields, {new: results.schema[name] for name, new in names.items()})


def ordered_table(model: MegatronInferStrategy, batch: SampleBatch) -> LengthTable:
    """The table by id, so that plans and members do not depend on which rank generated which sample. Collective."""
    table = model.gather_table(batch)
    return table.select(np.argsort(table.ids))


# ---- failures on all ranks together


def agree_on_plan(strategy: MegatronInferStrategy, make_plan: Callable[[], T]) -> T:
    """The result of `make_plan`. Collective; raises RankError, the same on all ranks, when it fails or hangs on one."""
    with strategy.layout.team.agree("planning"):
        plan = _plan_with_timeout(strategy, make_plan)
    return plan


def agree_on_each(strategy: MegatronInferStrategy, plans: Iterator[T]) -> Iterator[T]:
    """Yields `plans`, of equal number on all ranks, each through `agree_on_plan`."""
    while (plan := agree_on_plan(strategy, lambda: next(plans, None))) is not None:
        yield plan


def _plan_with_timeout(strategy: MegatronInferStrategy, make_plan: Callable[[], T]) -> T:
    """The result of `make_plan`. Raises PlanError at the timeout, and abandons the thread that plans."""
    if strategy.config is None:
        return make_plan()
    planned: Future[T] = Future()

    def plan() -> None:
        try:
            planned.set_result(make_plan())
        except BaseException as error:  # of any kind: raised on the rank's own thread
            planned.set_exception(error)

    threading.Thread(target=plan, name="planning", daemon=True).start()
    minutes = strategy.config.backend_timeout
    try:
        return planned.result(_SHARE_OF_TIMEOUT * 60 * minutes)
    except TimeoutError:
        if planned.done():  # raised by the planning itself
            raise
        raise PlanError(
            f"the packing algorithm {strategy.batching.train.algorithm!r} has not returned after "
            f"{_SHARE_OF_TIMEOUT * minutes:.3g} minutes, {_SHARE_OF_TIMEOUT:.0%} of backend_timeout: fix it, or raise "
            "backend_timeout"
        ) from None


@contextlib.contextmanager
def prefix_errors(role: str) -> Iterator[None]:
    """Begin errors of this package with `role`: "the model's outputs" alone could be those of any model."""
    try:
        yield
    except RollBatchingError as error:
        raise type(error)(f"{role}: {error}") from error.__cause__
