"""Trains on scored rollouts: draws mini-batches, plans each, adds old log-probs, and makes optimizer steps.

The members of a mini-batch are drawn at random, by id, before anything is balanced: they depend on the seed and not on
the parallel layout. One plan per mini-batch, made while the mini-batch before it trains, places the samples on the
data-parallel ranks, and `distribute` moves them there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from roll_batching.errors import DataError
from roll_batching.jobs.steps.passes import (
    Pass,
    add_results,
    agree_on_each,
    log_prob_pass,
    ordered_table,
    prefix_errors,
)
from roll_batching.losses import loss_spec
from roll_batching.losses.contract import CANDIDATES, VALUES
from roll_batching.packing.prefetch import prefetch_items
from roll_batching.planning import Plan
from roll_batching.planning import batch_balance as place_on_ranks
from roll_batching.planning.arrays import Ints
from roll_batching.samples import FieldSpec, LengthTable, SampleBatch, distribute
from roll_batching.samples.fields import EXPERTS_SPEC, ROUTED_EXPERTS
from roll_batching.samples.mini_batching import mini_batches, mini_batches_by_rank
from roll_batching.settings.batching import refuse_without_old_log_probs
from roll_batching.strategy import MegatronInferStrategy, MegatronTrainStrategy, StepResult
from roll_batching.strategy.roles import agree_on_plan, run_on

OLD, REFERENCE = "old_log_probs", "ref_log_probs"
"""The fields of the policy's log-probs before the step, and of the reference's."""


class RemoteLogProbs(Protocol):
    """A frozen model in other processes, which computes log-probs in parallel. Methods are collective."""

    def ask(self, local_batch: SampleBatch, masks: Sequence[str], /) -> None:
        """Requests log-probs of the samples of all ranks, on the tokens that the fields `masks` select."""

    def log_probs(self, local_batch: SampleBatch, /) -> torch.Tensor:
        """Waits for the requested log-probs; returns those of `local_batch`, next_token `[tokens]`."""


@dataclass(frozen=True, kw_only=True)
class MiniBatch:
    """The samples of one optimizer step, and the plan of the samples with a gradient (if none has, of one sample)."""

    epoch: int
    members: LengthTable
    """All samples of the mini-batch, on all ranks."""
    plan: Plan
    """Plan over those of `members` that are computed."""


@dataclass(frozen=True)
class MiniBatchPlanner:
    """Draws and plans mini-batches. Not collective, so that a thread may run it ahead of training."""

    strategy: MegatronTrainStrategy
    size: int
    """Rollouts of one optimizer step, over all data-parallel ranks: samples, where each has one."""
    seed: int
    idle_ids: Ints | None = None
    """Samples without a gradient, which are not computed."""
    home_rank: Ints | None = None
    """int64 [n]: the rank that each sample stays on; a mini-batch takes a share of each rank. None: drawn over all."""
    rollout_ids: Ints | None = None
    """int64 [n]: the rollout of each sample, whose samples share a mini-batch. None: every sample is its own."""

    def plan(self, table: LengthTable, epochs: range) -> Generator[MiniBatch]:
        """Yields the mini-batches of `epochs` over `table`; each is made while the one before it is used."""
        return prefetch_items(batch for epoch in epochs for batch in self._plan_epoch(table, epoch))

    def plan_forward(self, model: MegatronInferStrategy, table: LengthTable) -> Plan:
        """Plans a pass of `model`, in the same layout, without gradient."""
        return model.plan(table, forward=True, home_rank=self.home_rank)

    def _plan_epoch(self, table: LengthTable, epoch: int) -> Iterator[MiniBatch]:
        strategy, home_rank = self.strategy, self.home_rank
        drawing: dict[str, Any] = {"seed": self.seed, "epoch": epoch, "rollout_ids": self.rollout_ids}
        has_gradient = ~np.isin(table.ids, () if self.idle_ids is None else self.idle_ids)
        if home_rank is None:
            members_of = mini_batches(len(table), self.size, **drawing)
        else:
            members_of = mini_batches_by_rank(home_rank, strategy.layout.dp_size, self.size, **drawing)
        for members in members_of:
            computed = members[has_gradient[members]]
            if not computed.size:
                computed = members[:1]  # an optimizer step needs a backward pass, even if its gradient is 0
            plan = strategy.plan(table.select(computed), home_rank=None if home_rank is None else home_rank[computed])
            yield MiniBatch(epoch=epoch, members=table.select(members), plan=plan)


def train_on_rollouts(
    strategy: MegatronTrainStrategy,
    local_batch: SampleBatch,
    loss: Any,
    *,
    mini_batch_size: int,
    seed: int,
    epochs: int = 1,
    rollout_ids: Ints | None = None,
    batch_balance: bool = False,
    idle_ids: Ints | None = None,
    reference: MegatronInferStrategy | None = None,
    remote_reference: RemoteLogProbs | None = None,
    add_fields: Callable[[SampleBatch], SampleBatch] | None = None,
    router_replay: bool = False,
    update: bool = True,
) -> Iterator[tuple[Plan, StepResult]]:
    """Train on the samples of all ranks; yields plan and result of each optimizer step. Collective.

    Args:
        strategy: the policy; its `logprob_plan` says where old log-probs come from.
        local_batch: this rank's samples: `input_ids` and the fields that `loss` reads, such as `response_mask` and
            `advantages`. Old and reference log-probs are added here.
        loss: a loss object.
        mini_batch_size: rollouts of one optimizer step, over all data-parallel ranks.
        seed: of the mini-batches' members, another one in each RL step.
        epochs: passes over the samples.
        rollout_ids: int64 `[samples of all ranks]`, ascending by id of the samples: the rollout of each, whose samples
            share a mini-batch. None: each sample is a rollout.
        batch_balance: place the samples of the whole step on ranks first, as ROLL does, then draw each rank's share
            of a mini-batch among its own.
        idle_ids: int64 ids of the samples without a gradient, the same on all ranks: they are not computed, and count
            in the loss's denominators as far as their mask says.
        reference: adds `ref_log_probs`.
        remote_reference: the same in other processes, which compute while old log-probs are computed here.
        add_fields: adds fields that need the log-probs, such as advantages of tokens; may be collective.
        router_replay: record the experts of the pass of old log-probs, and train with them.
        update: False: only fields are added, and there is no optimizer step.
    """
    spec, table = loss_spec(loss), ordered_table(strategy, local_batch)
    # Distillation has no old policy; otherwise several optimizer steps need old log-probs.
    if strategy.batching.logprob_plan == "none" and CANDIDATES not in spec.needs:
        count = len(table) if rollout_ids is None else len(np.unique(rollout_ids))
        problem = refuse_without_old_log_probs(count, mini_batch_size, epochs)
        if problem is not None:
            raise DataError(f"logprob_plan: {problem}.")
    home_rank = None
    if batch_balance:
        home_rank = _home_ranks(strategy, table, rollout_ids)
    planner = MiniBatchPlanner(strategy, mini_batch_size, seed, idle_ids, home_rank, rollout_ids)
    if remote_reference is not None:
        remote_reference.ask(local_batch, spec.masks)
    # Recorded experts decide which samples share a prefix: only the epoch that records them is planned before that.
    first_epochs = range(int(strategy.batching.logprob_plan == "train") if router_replay else epochs)
    planned = planner.plan(table, first_epochs)
    with_old, batches = _add_old_log_probs(
        planner, table, local_batch, spec.masks, agree_on_each(strategy, planned), experts=router_replay
    )
    complete = _add_fields(planner, table, with_old, spec.masks, reference, remote_reference, add_fields)
    if not update:
        planned.close()
        return
    if router_replay:
        later = planner.plan(ordered_table(strategy, complete), range(len(first_epochs), epochs))
        batches = itertools.chain(batches, agree_on_each(strategy, later))
    yield from _train(planner, complete, loss, batches)


def _home_ranks(strategy: MegatronTrainStrategy, table: LengthTable, rollout_ids: Ints | None) -> Ints:
    """The rank that each sample stays on, by the cost of its rollout: that of one sequence of all its tokens."""
    rollout_of = np.arange(len(table)) if rollout_ids is None else np.unique(rollout_ids, return_inverse=True)[1]
    tokens = np.bincount(rollout_of, weights=table.lengths).astype(np.int64)
    return place_on_ranks(tokens, strategy.layout.dp_size, cost=strategy.state.cost)[rollout_of]


def train_on_values(
    critic: MegatronTrainStrategy, local_batch: SampleBatch, loss: Any, *, mini_batch_size: int, epochs: int, seed: int
) -> Iterator[tuple[Plan, StepResult]]:
    """Train a critic on the samples of all ranks; yields plan and result of each optimizer step. Collective.

    Arguments are those of `train_on_rollouts`; the samples have the fields that `loss` reads.
    """
    planner = MiniBatchPlanner(critic, mini_batch_size, seed)
    planned = planner.plan(ordered_table(critic, local_batch), range(epochs))
    yield from _train(planner, local_batch, loss, agree_on_each(critic, planned))


def _add_old_log_probs(
    planner: MiniBatchPlanner,
    table: LengthTable,
    local_batch: SampleBatch,
    masks: Sequence[str],
    batches: Iterator[MiniBatch],
    *,
    experts: bool,
) -> tuple[SampleBatch, Iterator[MiniBatch]]:
    """Adds `old_log_probs` by `logprob_plan` (with `experts`, routed experts too); returns (batch, all `batches`)."""
    strategy = planner.strategy
    source = strategy.batching.logprob_plan
    if source == "none":
        return local_batch, batches
    if source == "rollout":
        fields = {OLD: local_batch["rollout_log_probs"]}
        return local_batch.with_fields(fields, {OLD: FieldSpec("next_token")}), batches
    if source == "own":
        plans = iter([agree_on_plan(strategy, lambda: planner.plan_forward(strategy, table))])
    else:
        batches, read_ahead = itertools.tee(batches)
        first_epoch = itertools.takewhile(lambda batch: batch.epoch == 0, read_ahead)
        plans = (batch.plan for batch in first_epoch)  # the plans of training: the first ratio is exactly 1
    results = run_on(strategy, local_batch, log_prob_pass(strategy, masks, experts=experts), plans=plans)
    names = {"log_probs": OLD} | ({ROUTED_EXPERTS: ROUTED_EXPERTS} if experts else {})
    return add_results(local_batch, results, names), batches


def _add_fields(
    planner: MiniBatchPlanner,
    table: LengthTable,
    with_old: SampleBatch,
    masks: Sequence[str],
    reference: MegatronInferStrategy | None,
    remote_reference: RemoteLogProbs | None,
    add_custom_fields: Callable[[SampleBatch], SampleBatch] | None,
) -> SampleBatch:
    """Adds reference log-probs (local or remote) and the fields of `add_custom_fields` to `with_old`."""
    experts = with_old.fields.get(ROUTED_EXPERTS)
    # Recorded experts are left out meanwhile: other models, such as the reference and a critic, route for themselves.
    batch = with_old if experts is None else with_old.without(ROUTED_EXPERTS)
    if reference is not None:
        with reference.loaded("parameters"):
            plan = partial(planner.plan_forward, reference, table)
            batch = with_reference_log_probs(planner.strategy, reference, batch, masks, plan)
    if remote_reference is not None:
        log_probs = remote_reference.log_probs(batch)
        batch = batch.with_fields({REFERENCE: log_probs}, {REFERENCE: FieldSpec("next_token")})
    if add_custom_fields is not None:
        batch = add_custom_fields(batch)
    return batch if experts is None else batch.with_fields({ROUTED_EXPERTS: experts}, {ROUTED_EXPERTS: EXPERTS_SPEC})


def _train(
    planner: MiniBatchPlanner, local_batch: SampleBatch, loss: Any, batches: Iterator[MiniBatch]
) -> Iterator[tuple[Plan, StepResult]]:
    """Makes an optimizer step for each of `batches`; yields its plan and result."""
    strategy, prepare = planner.strategy, loss_spec(loss).prepare
    prepared = local_batch if prepare is None else prepare(local_batch, strategy.layout, planner.seed)
    for batch in batches:
        counts = None
        if planner.idle_ids is not None:
            # The plan leaves idle samples out, and the loss's denominators count their tokens all the same.
            is_local = prepared.find(batch.members.ids)[1].numpy()
            counts = strategy.count(prepared.select_ids(batch.members.ids[is_local]), loss)
        yield batch.plan, strategy.train_step(distribute(prepared, batch.plan), batch.plan, loss, counts=counts)


# ---- fields of frozen models


def with_reference_log_probs(
    strategy: MegatronInferStrategy,
    reference: MegatronInferStrategy,
    local_batch: SampleBatch,
    masks: Sequence[str],
    plan: Callable[[], Plan] | None = None,
) -> SampleBatch:
    """Adds `ref_log_probs` to `local_batch`, which is in the layout of `strategy`. Collective.

    `plan` makes the plan if both models have one layout; otherwise, and by default, `run_on` makes it.
    """
    with prefix_errors("reference"):
        plans = None
        if plan is not None and reference.layout.dims == strategy.layout.dims:
            plans = [agree_on_plan(strategy, plan)]
        results = run_on(reference, local_batch, log_prob_pass(reference, masks), strategy, plans=plans)
    return add_results(local_batch, results, {"log_probs": REFERENCE})


def with_reference_point(
    strategy: MegatronInferStrategy, reference: MegatronInferStrategy, local_batch: SampleBatch, mismatched: SampleBatch
) -> SampleBatch:
    """Adds KTO's `reference_point` to `local_batch`, by the current policy over all ranks' `mismatched`. Collective."""
    from roll_batching.losses.fine_tuning import reference_point  # other jobs need none

    masks = ("response_mask",)
    results = run_on(strategy, mismatched, log_prob_pass(strategy, masks))
    by_policy = add_results(mismatched, results, {"log_probs": "log_probs"})
    by_both = with_reference_log_probs(strategy, reference, by_policy, masks)
    points = torch.full((len(local_batch),), reference_point(by_both, strategy.layout))
    return local_batch.with_fields({"reference_point": points}, {"reference_point": FieldSpec("sample")})


def with_values(
    critic: MegatronInferStrategy, local_batch: SampleBatch, name: str, masks: Sequence[str]
) -> SampleBatch:
    """Adds the critic's values to `local_batch` under `name`, on a plan for passes without gradient. Collective."""
    run: Pass = lambda samples, plan: critic.forward(samples, plan, needs=(VALUES,), masks=masks)  # noqa: E731
    return add_results(local_batch, run_on(critic, local_batch, run), {VALUES: name})
