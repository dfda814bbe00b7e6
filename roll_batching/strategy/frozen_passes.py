"""Passes without gradient of a whole batch by any model on these ranks: plan, distribute, run, collect.

For the frozen models of a job (reference, teacher, critic) and the old log-probs of the policy.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TypeVar

import numpy as np
import torch

from roll_batching.errors import LayoutError, PlanError
from roll_batching.planning import Plan
from roll_batching.samples import SampleBatch, collect, distribute
from roll_batching.samples.layout_exchange import LayoutExchange
from roll_batching.strategy.infer import MegatronInferStrategy

T = TypeVar("T")
_SHARE_OF_TIMEOUT = 0.8
"""Of `backend_timeout`: a rank whose planning hangs must report it before the others stop waiting."""


def run_on(
    model: MegatronInferStrategy,
    batch: SampleBatch,
    run: Callable[[SampleBatch, Plan], SampleBatch],
    home: MegatronInferStrategy,
    *,
    plans: Iterable[Plan] | None = None,
) -> SampleBatch:
    """Results of `model` for the samples of all ranks, in the order of `batch`. Collective.

    Args:
        model: the strategy that computes, in any parallel layout of these processes.
        batch: this rank's samples, in the layout of `home`, with the fields that `run` reads.
        run: computes the results of samples placed by a plan, such as `model.compute_log_probs`.
        home: the strategy in whose layout `batch` lies, and the results.
        plans: plans over the samples, for a model in the layout of `home`: those of training, so that the pass rounds
            as training does. None: one plan for passes without gradient, by the settings of `model`.

    Returns:
        The fields of `run`'s result, one row per sample of `batch`. Samples outside of all `plans` have pad values.

    Raises:
        LayoutError: for `plans` and a model in another layout than `home`.
        RankError: on all ranks, when planning fails or hangs on any; and the errors of `run`.
    """
    exchange = None
    if model.layout.dims != home.layout.dims:
        exchange = LayoutExchange.of(home.layout.dp_rank, model.layout.dp_rank)
    if exchange is not None and plans is not None:
        raise LayoutError("run_on got plans for a model in another parallel layout: leave out plans, it makes its own")
    if plans is None:
        table = model.gather_table(batch)
        table = table.select(np.argsort(table.ids))  # plans do not depend on which rank holds which sample
        planned = table if exchange is None else exchange.in_target(table)
        plans = [agree_on_plan(model, lambda: model.plan(planned, forward=True))]
    parts = []
    for plan in plans:
        if exchange is None:
            results = run(distribute(batch, plan), plan)
            parts.append(collect(results, plan, like=batch))
        else:
            results = run(exchange.distribute(batch, plan, table), plan)
            parts.append(exchange.collect(results, plan, table, like=batch))
    return _with_all_samples(SampleBatch.concat(parts), batch)


def _with_all_samples(computed: SampleBatch, batch: SampleBatch) -> SampleBatch:
    """`computed` in the order of `batch`, with pad values for samples that it lacks."""
    missing = batch.select(torch.nonzero(~computed.find(batch.ids)[1])[:, 0])
    padding = {
        name: computed[name].new_full((missing.num_tokens, *computed[name].shape[1:]), spec.pad)
        for name, spec in computed.schema.items()
    }
    padded = SampleBatch(missing.ids, missing.lengths, padding, computed.schema)
    return SampleBatch.concat([computed, padded]).select_ids(batch.ids)


def agree_on_plan(strategy: MegatronInferStrategy, make_plan: Callable[[], T]) -> T:
    """The result of `make_plan`. Collective; raises RankError, the same on all ranks, when it fails or hangs on one.

    A user's packing algorithm may fail or hang on one rank alone. Ranks with different plans are found where a plan is
    first used (`distribute`, and every pass).
    """
    with strategy.layout.team.agree("planning"):
        plan = _plan_with_timeout(strategy, make_plan)
    return plan


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
