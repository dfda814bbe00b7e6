"""From scored rollouts to optimizer steps: membership, one plan per mini-batch, old log-probs, training.

Which samples share an optimizer step is drawn at random, by id, before anything is balanced; it depends on the
seed and not on the parallel layout. Then one plan per mini-batch, made while the mini-batch before it trains,
places the samples on the data-parallel ranks, and `distribute` moves them there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from roll_batching.errors import DataError
from roll_batching.jobs.steps.agreed_plans import agreed, agreed_one_by_one
from roll_batching.losses import loss_spec
from roll_batching.packing.prefetch import one_ahead
from roll_batching.planning import Plan, batch_balance
from roll_batching.samples import FieldSpec, LengthTable, SampleBatch, collect, distribute, gather_lengths
from roll_batching.samples.layout_exchange import LayoutExchange
from roll_batching.samples.membership import mini_batches, mini_batches_by_rank
from roll_batching.settings.batching import refuse_without_old_log_probs
from roll_batching.strategy import MegatronInferStrategy, MegatronTrainStrategy, StepResult

REFERENCE = "ref_log_probs"
"""The field of the reference's log-probs."""


@dataclass(frozen=True, kw_only=True)
class UpdateSettings:
    """How the samples of a step are trained on."""

    mini_batch_size: int
    """Sequences of one optimizer step, over all data-parallel ranks."""
    epochs: int = 1
    """Passes over the samples."""
    batch_balance: bool = False
    """Place the samples of the whole step on ranks first, and draw each rank's share of a mini-batch among its own."""


@dataclass(frozen=True, kw_only=True)
class Update:
    """One optimizer step: its plan and what came out."""

    plan: Plan
    result: StepResult


class RemoteLogProbs(Protocol):
    """A frozen model elsewhere, which computes while others do. Methods are collective."""

    def ask(self, home: SampleBatch, masks: Sequence[str]) -> None:
        """Wants log-probs of the samples of all ranks, `home` being this rank's, where `masks` say so."""

    def log_probs(self, home: SampleBatch) -> torch.Tensor:
        """next_token `[tokens]` of `home`: what was asked for, waited for."""


@dataclass(frozen=True, kw_only=True)
class _MiniBatch:
    epoch: int
    members: LengthTable
    """All samples of the optimizer step, on all ranks."""
    plan: Plan
    """Of those that are computed."""


@dataclass(frozen=True, kw_only=True)
class _Samples:
    """The samples of a step, on all ranks, by id."""

    table: LengthTable
    working: np.ndarray
    """bool [n]: which have a gradient."""
    homes: np.ndarray | None
    """int64 [n]: the rank that each stays on; None where every plan places its samples itself."""

    def forward_plan(self, strategy: MegatronInferStrategy) -> Plan:
        """All samples in one pass without gradient."""
        return strategy.plan(self.table, forward=True, home_rank=self.homes)


def train_on_rollouts(
    strategy: MegatronTrainStrategy,
    home: SampleBatch,
    loss: Any,
    settings: UpdateSettings,
    *,
    seed: int,
    idle: SampleBatch | None = None,
    reference: MegatronInferStrategy | None = None,
    apart: RemoteLogProbs | None = None,
    finish: Callable[[SampleBatch], SampleBatch] | None = None,
) -> Iterator[Update]:
    """Train on the samples of all ranks, `home` being this rank's, and yield after each optimizer step. Collective.

    `home` has `input_ids` and what `loss` reads, such as `response_mask` and `advantages`; old and reference log-probs
    are added here, as the strategy's `logprob_plan` and `reference` ask; `apart` is a reference elsewhere, which works
    while old log-probs are computed. `seed` is this step's own, for membership.
    `idle` is the part of `home` that has no gradient: it is not computed, and counts in the loss's denominators as far
    as its mask says. All ranks pass it (empty, where they have no such sample), or none. `finish` makes of `home`, once
    it has log-probs, what is trained on; it may be collective.
    """
    spec = loss_spec(loss)
    masks = spec.masks
    table = gather_lengths(home)
    table = table.select(np.argsort(table.ids))  # membership must not depend on who generated what
    if strategy.batching.logprob_plan == "none":
        problem = refuse_without_old_log_probs(len(table), settings.mini_batch_size, settings.epochs)
        if problem is not None:
            raise DataError(f"logprob_plan: {problem}.")
    working = np.ones(len(table), dtype=bool)
    if idle is not None:
        working = ~np.isin(table.ids, gather_lengths(idle).ids)
    homes = None
    if settings.batch_balance:
        homes = batch_balance(table.lengths, strategy.layout.dp_size, cost=strategy.state.cost)
    samples = _Samples(table=table, working=working, homes=homes)
    if apart is not None:
        apart.ask(home, masks)
    ahead = one_ahead(_mini_batches(strategy, samples, settings, seed=seed))
    batches: Iterator[_MiniBatch] = agreed_one_by_one(strategy, ahead)
    if strategy.batching.logprob_plan == "rollout":
        drawn_with = home["rollout_log_probs"]
        home = home.with_fields({"old_log_probs": drawn_with}, {"old_log_probs": FieldSpec("next_token")})
    elif strategy.batching.logprob_plan != "none":
        if strategy.batching.logprob_plan == "own":
            plans = iter([agreed(strategy, lambda: samples.forward_plan(strategy))])
        else:
            batches, again = itertools.tee(batches)
            first_epoch = itertools.takewhile(lambda batch: batch.epoch == 0, again)
            plans = (batch.plan for batch in first_epoch)  # so that the first ratio is exactly 1
        home = with_log_probs(strategy, home, plans, "old_log_probs", masks)
    if reference is not None:
        with reference.loaded("parameters"):
            home = with_reference(strategy, reference, home, lambda: samples.forward_plan(reference), masks)
    if apart is not None:
        home = home.with_fields({REFERENCE: apart.log_probs(home)}, {REFERENCE: FieldSpec("next_token")})
    if finish is not None:
        home = finish(home)
    if spec.prepare is not None:
        home = spec.prepare(home, strategy.layout, seed)
    for batch in batches:
        counts = None
        if idle is not None:
            held = home.find(batch.members.ids)[1].numpy()
            counts = strategy.count(home.select_ids(batch.members.ids[held]), loss)
        local = distribute(home, batch.plan)
        yield Update(plan=batch.plan, result=strategy.train_step(local, batch.plan, loss, counts=counts))


def _mini_batches(
    strategy: MegatronTrainStrategy, samples: _Samples, settings: UpdateSettings, *, seed: int
) -> Iterator[_MiniBatch]:
    """The mini-batches of all passes over the samples, planned. Pure, so that a thread may make them ahead."""
    table, homes, size = samples.table, samples.homes, settings.mini_batch_size
    for epoch in range(settings.epochs):
        if homes is None:
            drawn = mini_batches(len(table), size, seed=seed, epoch=epoch)
        else:
            drawn = mini_batches_by_rank(homes, strategy.layout.dp_size, size, seed=seed, epoch=epoch)
        for members in drawn:
            computed = members[samples.working[members]]
            if not computed.size:
                computed = members[:1]  # an optimizer step needs a backward pass, if only with a gradient of 0
            plan = strategy.plan(table.select(computed), home_rank=None if homes is None else homes[computed])
            yield _MiniBatch(epoch=epoch, members=table.select(members), plan=plan)


def layout_exchange_between(strategy: MegatronInferStrategy, other: MegatronInferStrategy) -> LayoutExchange | None:
    """The way between the layout of `strategy`, where samples lie, and that of `other`; None where they are one.

    Collective.
    """
    if strategy.layout.dims == other.layout.dims:
        return None
    return LayoutExchange.of(strategy.layout.dp_rank, other.layout.dp_rank)


def with_reference(
    strategy: MegatronInferStrategy,
    reference: MegatronInferStrategy,
    home: SampleBatch,
    plan: Callable[[], Plan],
    masks: Sequence[str],
) -> SampleBatch:
    """`home`, which lies in the layout of `strategy`, with the reference's log-probs. Collective.

    `plan` makes the plan of a reference in the same layout; one in its own plans for itself.
    """
    crossing = layout_exchange_between(strategy, reference)
    if crossing is None:
        return with_log_probs(reference, home, [agreed(strategy, plan)], REFERENCE, masks)
    return with_log_probs_over(crossing, reference, home, gather_lengths(home), REFERENCE, masks)


def with_log_probs_over(
    crossing: LayoutExchange,
    strategy: MegatronInferStrategy,
    home: SampleBatch,
    table: LengthTable,
    name: str,
    masks: Sequence[str] | None,
) -> SampleBatch:
    """`with_log_probs` of a strategy in another layout than that in which `home` lies, as `table` says. Collective."""
    plan = agreed(strategy, lambda: strategy.plan(crossing.seen(table), forward=True))
    local = crossing.distribute(home, plan, table)
    found = crossing.collect(strategy.compute_log_probs(local, plan, masks=masks), plan, table, like=home)
    return home.with_fields({name: found["log_probs"]}, {name: FieldSpec("next_token")})


def with_log_probs(
    strategy: MegatronInferStrategy,
    home: SampleBatch,
    plans: Iterable[Plan],
    name: str,
    masks: Sequence[str],
) -> SampleBatch:
    """`home` with the model's log-probs under `name`; samples that no plan holds read 0. Collective."""
    parts = []
    for plan in plans:
        local = distribute(home, plan)
        parts.append(collect(strategy.compute_log_probs(local, plan, masks=masks), plan, like=home))
    computed = SampleBatch.concat(parts)
    absent = home.select(torch.nonzero(~computed.find(home.ids)[1])[:, 0])
    zeros = torch.zeros(absent.num_tokens, dtype=computed["log_probs"].dtype)
    filled = SampleBatch(absent.ids, absent.lengths, {"log_probs": zeros}, computed.schema)
    values = SampleBatch.concat([computed, filled]).select_ids(home.ids)["log_probs"]
    return home.with_fields({name: values}, {name: FieldSpec("next_token")})
