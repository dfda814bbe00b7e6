"""From scored rollouts to optimizer steps: membership, one plan per mini-batch, old log-probs, training.

Which samples share an optimizer step is drawn at random, by id, before anything is balanced; it depends on the
seed and not on the parallel layout. Then one plan per mini-batch places the samples on the data-parallel ranks,
and `distribute` moves them there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from roll_batching.data import FieldSpec, LengthTable, SampleBatch, collect, distribute, gather_lengths
from roll_batching.data.membership import mini_batches
from roll_batching.losses import loss_spec
from roll_batching.planning import Plan
from roll_batching.strategy import MegatronInferStrategy, MegatronTrainStrategy, StepResult


@dataclass(frozen=True, kw_only=True)
class UpdateSettings:
    """How the samples of a step are trained on."""

    mini_batch_size: int
    """Sequences of one optimizer step, over all data-parallel ranks."""
    epochs: int = 1
    """Passes over the samples."""


@dataclass(frozen=True, kw_only=True)
class Update:
    """One optimizer step: its plan and what came out."""

    plan: Plan
    result: StepResult


@dataclass(frozen=True, kw_only=True)
class _MiniBatch:
    members: LengthTable
    """All samples of the optimizer step, on all ranks."""
    plan: Plan
    """Of those that are computed."""


def train_on_rollouts(
    strategy: MegatronTrainStrategy,
    home: SampleBatch,
    loss: Any,
    settings: UpdateSettings,
    *,
    seed: int,
    idle: SampleBatch | None = None,
    reference: MegatronInferStrategy | None = None,
    finish: Callable[[SampleBatch], SampleBatch] | None = None,
) -> Iterator[Update]:
    """Train on the samples of all ranks, `home` being this rank's, and yield after each optimizer step. Collective.

    `home` has `input_ids` and what `loss` reads, such as `response_mask` and `advantages`; old and reference log-probs
    are added here, as the strategy's `logprob_plan` and `reference` ask. `seed` is this step's own, for membership.
    `idle` is the part of `home` that has no gradient: it is not computed, and counts in the loss's denominators as far
    as its mask says. All ranks pass it (empty, where they have no such sample), or none. `finish` makes of `home`, once
    it has log-probs, what is trained on; it may be collective.
    """
    spec = loss_spec(loss)
    masks = spec.masks
    table = gather_lengths(home)
    table = table.select(np.argsort(table.ids))  # membership must not depend on who generated what
    working = np.ones(len(table), dtype=bool)
    if idle is not None:
        working = ~np.isin(table.ids, gather_lengths(idle).ids)
    first_epoch = list(_epoch(strategy, table, working, settings, seed=seed, epoch=0))
    if strategy.batching.logprob_plan != "none":
        home = _with_old_log_probs(strategy, home, table, [m.plan for m in first_epoch], masks)
    if reference is not None:
        home = with_log_probs(reference, home, [reference.plan(table, forward=True)], "ref_log_probs", masks)
    if finish is not None:
        home = finish(home)
    if spec.prepare is not None:
        home = spec.prepare(home, strategy.layout, seed)
    for epoch in range(settings.epochs):
        batches = _epoch(strategy, table, working, settings, seed=seed, epoch=epoch) if epoch else first_epoch
        for batch in batches:
            counts = None
            if idle is not None:
                held = home.find(batch.members.ids)[1].numpy()
                counts = strategy.count(home.select_ids(batch.members.ids[held]), loss)
            local = distribute(home, batch.plan)
            yield Update(plan=batch.plan, result=strategy.train_step(local, batch.plan, loss, counts=counts))


def _epoch(
    strategy: MegatronTrainStrategy,
    table: LengthTable,
    working: np.ndarray,
    settings: UpdateSettings,
    *,
    seed: int,
    epoch: int,
) -> Iterator[_MiniBatch]:
    """The mini-batches of a pass over the samples, planned."""
    for members in mini_batches(len(table), settings.mini_batch_size, seed=seed, epoch=epoch):
        computed = members[working[members]]
        if not computed.size:
            computed = members[:1]  # an optimizer step needs a backward pass, if only with a gradient of 0
        yield _MiniBatch(members=table.select(members), plan=strategy.plan(table.select(computed)))


def _with_old_log_probs(
    strategy: MegatronTrainStrategy,
    home: SampleBatch,
    table: LengthTable,
    plans: Sequence[Plan],
    masks: Sequence[str],
) -> SampleBatch:
    """`logprob_plan: train` shares the plans of the first epoch, so that the first ratio is exactly 1."""
    if strategy.batching.logprob_plan == "own":
        plans = [strategy.plan(table, forward=True)]
    return with_log_probs(strategy, home, plans, "old_log_probs", masks)


def with_log_probs(
    strategy: MegatronInferStrategy,
    home: SampleBatch,
    plans: Sequence[Plan],
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
