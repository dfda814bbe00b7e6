"""From scored rollouts to optimizer steps: mini-batches, one plan each, old log-probs, training.

The members of a mini-batch are drawn at random, by id, before anything is balanced: they depend on the seed and not on
the parallel layout. One plan per mini-batch, made while the mini-batch before it trains, places the samples on the
data-parallel ranks, and `distribute` moves them there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from roll_batching.errors import DataError
from roll_batching.jobs.steps.plan_consensus import agree_on_each, prefix_errors
from roll_batching.losses import loss_spec
from roll_batching.losses.contract import CANDIDATES, VALUES
from roll_batching.packing.prefetch import prefetch_items
from roll_batching.planning import Plan
from roll_batching.planning import batch_balance as place_on_ranks
from roll_batching.planning.arrays import Ints
from roll_batching.samples import FieldSpec, LengthTable, SampleBatch, collect, distribute
from roll_batching.samples.fields import EXPERTS_SPEC, ROUTED_EXPERTS
from roll_batching.samples.layout_exchange import LayoutExchange
from roll_batching.samples.mini_batching import mini_batches, mini_batches_by_rank
from roll_batching.settings.batching import refuse_without_old_log_probs
from roll_batching.strategy import MegatronInferStrategy, MegatronTrainStrategy, StepResult
from roll_batching.strategy.roles import agree_on_plan

REFERENCE = "ref_log_probs"
"""The field of the reference's log-probs."""


class RemoteLogProbs(Protocol):
    """A frozen model in other processes, which computes log-probs in parallel. Methods are collective."""

    def ask(self, local_batch: SampleBatch, masks: Sequence[str], /) -> None:
        """Request log-probs of the samples of all ranks, on the tokens of `masks`."""

    def log_probs(self, local_batch: SampleBatch, /) -> torch.Tensor:
        """The requested log-probs of `local_batch`: next_token `[tokens]`. Waits for them."""


@dataclass(frozen=True, kw_only=True)
class MiniBatch:
    """The samples of one optimizer step, and the plan of those with a gradient (of one sample, where none has)."""

    epoch: int
    members: LengthTable
    """All samples of the mini-batch, on all ranks."""
    plan: Plan
    """Over a subset of `members`."""


def train_on_rollouts(
    strategy: MegatronTrainStrategy,
    local_batch: SampleBatch,
    loss: Any,
    *,
    mini_batch_size: int,
    seed: int,
    epochs: int = 1,
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
        mini_batch_size: sequences of one optimizer step, over all data-parallel ranks.
        seed: of the mini-batches' members, another one in each RL step.
        epochs: passes over the samples.
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
    spec = loss_spec(loss)
    masks = spec.masks
    table = _ordered_table(strategy, local_batch)
    if strategy.batching.logprob_plan == "none" and CANDIDATES not in spec.needs:  # distillation has no old policy
        problem = refuse_without_old_log_probs(len(table), mini_batch_size, epochs)
        if problem is not None:
            raise DataError(f"logprob_plan: {problem}.")
    home_rank = None
    if batch_balance:
        home_rank = place_on_ranks(table.lengths, strategy.layout.dp_size, cost=strategy.state.cost)

    def plan_forward(model: MegatronInferStrategy) -> Plan:
        return model.plan(table, forward=True, home_rank=home_rank)

    if remote_reference is not None:
        remote_reference.ask(local_batch, masks)
    has_gradient = np.ones(len(table), dtype=bool) if idle_ids is None else ~np.isin(table.ids, idle_ids)

    def plan_epochs(table: LengthTable, chosen: range) -> Generator[MiniBatch]:
        return prefetch_items(
            _plan_mini_batches(strategy, table, has_gradient, home_rank, mini_batch_size, epochs=chosen, seed=seed)
        )

    # Recorded experts decide what samples share, so epochs other than that of the recording packs are planned after it.
    first_epochs = range(int(strategy.batching.logprob_plan == "train") if router_replay else epochs)
    planned = plan_epochs(table, first_epochs)
    batches: Iterator[MiniBatch] = agree_on_each(strategy, planned)
    if strategy.batching.logprob_plan == "rollout":
        rollout_log_probs = local_batch["rollout_log_probs"]
        local_batch = local_batch.with_fields(
            {"old_log_probs": rollout_log_probs}, {"old_log_probs": FieldSpec("next_token")}
        )
    elif strategy.batching.logprob_plan != "none":
        if strategy.batching.logprob_plan == "own":
            plans = iter([agree_on_plan(strategy, lambda: plan_forward(strategy))])
        else:
            batches, again = itertools.tee(batches)
            first_epoch = itertools.takewhile(lambda batch: batch.epoch == 0, again)
            plans = (batch.plan for batch in first_epoch)  # the plans of training: the first ratio is exactly 1
        local_batch = with_log_probs(strategy, local_batch, plans, "old_log_probs", masks, experts=router_replay)
        if router_replay:
            later = plan_epochs(_ordered_table(strategy, local_batch), range(len(first_epochs), epochs))
            batches = itertools.chain(batches, agree_on_each(strategy, later))
    if (experts := local_batch.fields.get(ROUTED_EXPERTS)) is not None:
        local_batch = local_batch.without(ROUTED_EXPERTS)  # reference and critic have their own
    if reference is not None:
        with reference.loaded("parameters"):
            local_batch = with_reference_log_probs(
                strategy, reference, local_batch, lambda: plan_forward(reference), masks
            )
    if remote_reference is not None:
        log_probs = remote_reference.log_probs(local_batch)
        local_batch = local_batch.with_fields({REFERENCE: log_probs}, {REFERENCE: FieldSpec("next_token")})
    if add_fields is not None:
        local_batch = add_fields(local_batch)
    if not update:
        planned.close()
        return
    if experts is not None:
        local_batch = local_batch.with_fields({ROUTED_EXPERTS: experts}, {ROUTED_EXPERTS: EXPERTS_SPEC})
    if spec.prepare is not None:
        local_batch = spec.prepare(local_batch, strategy.layout, seed)
    for batch in batches:
        counts = None
        if idle_ids is not None:
            # The plan leaves idle samples out, and the loss's denominators count their tokens all the same.
            is_local = local_batch.find(batch.members.ids)[1].numpy()
            counts = strategy.count(local_batch.select_ids(batch.members.ids[is_local]), loss)
        placed = distribute(local_batch, batch.plan)
        yield batch.plan, strategy.train_step(placed, batch.plan, loss, counts=counts)


def train_on_values(
    critic: MegatronTrainStrategy, local_batch: SampleBatch, loss: Any, *, mini_batch_size: int, epochs: int, seed: int
) -> Iterator[tuple[Plan, StepResult]]:
    """Train a critic on the samples of all ranks; yields plan and result of each optimizer step. Collective.

    Arguments are those of `train_on_rollouts`; the samples have the fields that `loss` reads.
    """
    table = _ordered_table(critic, local_batch)
    has_gradient = np.ones(len(table), dtype=bool)
    planned = prefetch_items(
        _plan_mini_batches(critic, table, has_gradient, None, mini_batch_size, epochs=range(epochs), seed=seed)
    )
    for batch in agree_on_each(critic, planned):
        yield batch.plan, critic.train_step(distribute(local_batch, batch.plan), batch.plan, loss)


def _ordered_table(strategy: MegatronInferStrategy, local_batch: SampleBatch) -> LengthTable:
    """The table by id, so that plans and members do not depend on which rank generated which sample. Collective."""
    table = strategy.gather_table(local_batch)
    return table.select(np.argsort(table.ids))


def _plan_mini_batches(
    strategy: MegatronTrainStrategy,
    table: LengthTable,
    has_gradient: np.ndarray,
    home_rank: Ints | None,
    size: int,
    *,
    epochs: range,
    seed: int,
) -> Iterator[MiniBatch]:
    """The mini-batches of `epochs`, planned; `has_gradient` is bool [n], `home_rank` int64 [n], both as `table`.

    Not collective, so that a thread may run it ahead of training.
    """
    for epoch in epochs:
        if home_rank is None:
            members_of = mini_batches(len(table), size, seed=seed, epoch=epoch)
        else:
            members_of = mini_batches_by_rank(home_rank, strategy.layout.dp_size, size, seed=seed, epoch=epoch)
        for members in members_of:
            computed = members[has_gradient[members]]
            if not computed.size:
                computed = members[:1]  # an optimizer step needs a backward pass, even if its gradient is 0
            plan = strategy.plan(table.select(computed), home_rank=None if home_rank is None else home_rank[computed])
            yield MiniBatch(epoch=epoch, members=table.select(members), plan=plan)


def layout_exchange_between(strategy: MegatronInferStrategy, other: MegatronInferStrategy) -> LayoutExchange | None:
    """The exchange of samples between the two strategies' parallel layouts; None where they are equal. Collective."""
    if strategy.layout.dims == other.layout.dims:
        return None
    return LayoutExchange.of(strategy.layout.dp_rank, other.layout.dp_rank)


def with_reference_log_probs(
    strategy: MegatronInferStrategy,
    reference: MegatronInferStrategy,
    local_batch: SampleBatch,
    plan: Callable[[], Plan],
    masks: Sequence[str],
) -> SampleBatch:
    """`local_batch`, in the layout of `strategy`, with `ref_log_probs`. Collective.

    `plan` makes the plan of a reference in the same layout; one in another layout plans for itself.
    """
    layout_exchange = layout_exchange_between(strategy, reference)
    with prefix_errors("reference"):
        if layout_exchange is None:
            return with_log_probs(reference, local_batch, [agree_on_plan(strategy, plan)], REFERENCE, masks)
        table = reference.gather_table(local_batch)
        return with_log_probs_over(layout_exchange, reference, local_batch, table, REFERENCE, masks)


def with_reference_point(
    strategy: MegatronInferStrategy, reference: MegatronInferStrategy, local_batch: SampleBatch, mismatched: SampleBatch
) -> SampleBatch:
    """`local_batch` with `reference_point` of KTO, by the current policy over `mismatched` of all ranks. Collective."""
    from roll_batching.losses.fine_tuning import reference_point  # other jobs need none

    masks, table = ("response_mask",), _ordered_table(strategy, mismatched)
    plan = agree_on_plan(strategy, lambda: strategy.plan(table, forward=True))
    other = with_log_probs(strategy, mismatched, [plan], "log_probs", masks)
    other = with_reference_log_probs(strategy, reference, other, lambda: reference.plan(table, forward=True), masks)
    points = torch.full((len(local_batch),), reference_point(other, strategy.layout))
    return local_batch.with_fields({"reference_point": points}, {"reference_point": FieldSpec("sample")})


def with_log_probs_over(
    layout_exchange: LayoutExchange,
    strategy: MegatronInferStrategy,
    local_batch: SampleBatch,
    table: LengthTable,
    name: str,
    masks: Sequence[str] | None,
) -> SampleBatch:
    """As `with_log_probs`, by a strategy in another layout than that of `local_batch` and `table`. Collective."""
    plan = agree_on_plan(strategy, lambda: strategy.plan(layout_exchange.in_target(table), forward=True))
    placed = layout_exchange.distribute(local_batch, plan, table)
    results = layout_exchange.collect(
        strategy.compute_log_probs(placed, plan, masks=masks), plan, table, like=local_batch
    )
    return local_batch.with_fields({name: results["log_probs"]}, {name: FieldSpec("next_token")})


def with_values(
    critic: MegatronInferStrategy, local_batch: SampleBatch, name: str, masks: Sequence[str]
) -> SampleBatch:
    """`local_batch` with the critic's values under `name`, on a plan for passes without gradient. Collective."""
    table = _ordered_table(critic, local_batch)
    plan = agree_on_plan(critic, lambda: critic.plan(table, forward=True))
    placed = distribute(local_batch, plan)
    results = collect(critic.forward(placed, plan, needs=(VALUES,), masks=masks), plan, like=local_batch)
    values = results.select_ids(local_batch.ids)[VALUES]
    return local_batch.with_fields({name: values}, {name: FieldSpec("next_token")})


def with_log_probs(
    strategy: MegatronInferStrategy,
    local_batch: SampleBatch,
    plans: Iterable[Plan],
    name: str,
    masks: Sequence[str],
    *,
    experts: bool = False,
) -> SampleBatch:
    """`local_batch` with the model's log-probs under `name`; 0 for samples outside all `plans`. Collective.

    `experts` adds the experts that its routers chose, as `routed_experts`.
    """
    needs = ("log_probs", ROUTED_EXPERTS) if experts else ("log_probs",)
    parts = []
    for plan in plans:
        placed = distribute(local_batch, plan)
        if experts:
            results = strategy.forward(placed, plan, needs, masks)
        else:
            results = strategy.compute_log_probs(placed, plan, masks=masks)
        parts.append(collect(results, plan, like=local_batch))
    computed = SampleBatch.concat(parts)
    missing = local_batch.select(torch.nonzero(~computed.find(local_batch.ids)[1])[:, 0])
    padding = {
        key: computed[key].new_full((missing.num_tokens, *computed[key].shape[1:]), spec.pad)
        for key, spec in computed.schema.items()
    }
    filled = SampleBatch(missing.ids, missing.lengths, padding, computed.schema)
    values = SampleBatch.concat([computed, filled]).select_ids(local_batch.ids)
    names = {"log_probs": name, ROUTED_EXPERTS: ROUTED_EXPERTS}
    return local_batch.with_fields(
        {names[key]: values[key] for key in needs}, {names[key]: computed.schema[key] for key in needs}
    )
