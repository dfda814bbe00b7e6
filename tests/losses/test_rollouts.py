"""Losses that average over rollouts: each counts once, however many samples it has and wherever they lie."""

from __future__ import annotations

from typing import Any

import pytest

from tests.losses.steps import VOCABULARY, gap, make_strategy, mine, refill, step
from tests.support.layouts import Layout
from tests.support.ranks import meet, part, run_ranks

pytestmark = pytest.mark.loss

HERE = "tests.losses.test_rollouts:"
PIECES = (1, 3, 9, 2, 1, 6)
"""Samples of each rollout."""
EXACT = 1e-7
MEANS = ("rollout_token_mean", "rollout_mean")


def rollouts(*, apart: bool) -> Any:
    """Rollouts of several turns: as one long sample each, or with each turn's history and the turn as a sample."""
    import torch

    from roll_batching.samples import SampleBatch

    g = torch.Generator().manual_seed(5)
    columns: dict[str, list[Any]] = {name: [] for name in ("input_ids", "response_mask", "old_log_probs")}
    advantages, ids = [], []
    for rollout, turns in enumerate(PIECES):
        ends = torch.randint(2, 6, (turns,), generator=g).cumsum(0).tolist()
        tokens = torch.randint(0, 61, (ends[-1],), generator=g)
        old = -4 + torch.randn(ends[-1], generator=g, dtype=torch.float64) / 5
        mask = torch.rand(ends[-1], generator=g) < 0.7
        mask[[end - 1 for end in ends]] = True
        advantage = float(torch.randn((), generator=g))
        for start, end in zip([0, *ends], ends, strict=False) if apart else [(0, ends[-1])]:
            columns["input_ids"].append(tokens[:end])
            columns["response_mask"].append(mask[:end] & (torch.arange(end) >= start))
            columns["old_log_probs"].append(old[:end])
            advantages.append(advantage)
            ids.append(7 - 3 * rollout)
    order = torch.randperm(len(ids), generator=g).tolist()  # the samples of a rollout lie on several ranks
    shuffled = {name: [values[i] for i in order] for name, values in columns.items()}
    shuffled |= {"advantages": torch.tensor(advantages)[order], "rollout_ids": torch.tensor(ids)[order]}
    kinds = {"input_ids": "token", "response_mask": "token", "old_log_probs": "next_token"}
    return SampleBatch.from_lists(shuffled, kinds | dict.fromkeys(("advantages", "rollout_ids"), "sample"))


class ByToken:
    """-A log p, averaged by the view's reduction `how`."""

    masks, rollouts = ("response_mask",), True

    def __init__(self, how: str) -> None:
        self.how = how

    def token_loss(self, tokens: Any) -> Any:
        from roll_batching.losses import LossOutput

        return LossOutput(getattr(tokens, self.how)(-tokens.per_token("advantages") * tokens.log_probs))


class BySequence:
    """The same, sequence by sequence."""

    masks, rollouts = ("response_mask",), True

    def __init__(self, how: str) -> None:
        self.how = how

    def sequence_loss(self, sequence: Any) -> Any:
        from roll_batching.losses import LossOutput

        return LossOutput(getattr(sequence, self.how)(-sequence["advantages"] * sequence.log_probs()))


def steps_of(layouts: list[Layout]) -> dict[str, dict[str, Any]]:
    """By layout and case, loss and gradients of a step, on every rank."""
    from roll_batching.losses import PolicyLoss
    from roll_batching.samples import distribute, gather_lengths
    from tests.support.models import whole_gradients

    losses = {how: PolicyLoss(aggregation=how, entropy_coef=0.01) for how in MEANS}
    losses |= {f"{how}, by sequence": BySequence(how) for how in MEANS}
    long = PolicyLoss(aggregation="sequence_mean", entropy_coef=0.01)
    found: dict[str, dict[str, Any]] = {}
    for number, layout in enumerate(layouts):
        meet(number)
        strategy = make_strategy(megatron=layout.megatron(), dtype="fp64")
        steps = {name: step(strategy, rollouts(apart=True), loss) for name, loss in losses.items()}
        if layout == Layout():
            steps["one long sample"] = step(strategy, rollouts(apart=False), long)
            steps |= {f"{how}, by token": step(strategy, rollouts(apart=True), ByToken(how)) for how in MEANS}
        # Denominators of all samples, of which the step computes a part.
        local, loss = mine(strategy, rollouts(apart=True)), losses["rollout_mean"]
        kept = local.select((local.ids % 3 != 0).nonzero()[:, 0])
        plan = strategy.plan(gather_lengths(kept))
        refill(strategy)
        given = strategy.train_step(distribute(kept, plan), plan, loss, counts=strategy.count(local, loss))
        gradients = whole_gradients(strategy.chunks, VOCABULARY, strategy.layout.tp_rank, False)
        steps["counts of more samples"] = given, gradients
        found[str(layout)] = {name: (result.loss, gradients) for name, (result, gradients) in steps.items()}
        part()
    return found


LAYOUTS = {
    1: [Layout()],
    2: [Layout(dp=2), Layout(cp=2)],
    4: [Layout(dp=2, pp=2), Layout(dp=2, cp=2, per_token=False)],
}


def test_rollouts_count_alike_in_every_layout(report: Any) -> None:
    steps: dict[str, dict[str, Any]] = {}
    for ranks, layouts in LAYOUTS.items():
        steps |= run_ranks(ranks, HERE + "steps_of", layouts)[0]
    (alone, of_one), *others = steps.items()
    gaps = {f"{alone}, pieces against long samples": gap(of_one["rollout_token_mean"], of_one["one long sample"])}
    gaps |= {f"{alone}, {how}": gap(of_one[f"{how}, by sequence"], of_one[f"{how}, by token"]) for how in MEANS}
    gaps |= {f"{layout}, {name}": gap(steps[name], of_one[name]) for layout, steps in others for name in steps}
    for name, (loss, gradients) in gaps.items():
        report(f"{name}: loss {loss:.1e}, gradients {gradients:.1e}")
    assert max(value for both in gaps.values() for value in both) < EXACT


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("ids", "said"),
    [
        (None, "a mean over rollouts needs the sample field 'rollout_ids', and the batch lacks it: add it"),
        ([0.5] * 5, "rollout_ids has torch.float32 of shape (5,): give one integer per sample"),
    ],
)
def test_ids_that_are_none_are_refused(ids: list[float] | None, said: str) -> None:
    import torch

    from roll_batching.errors import DataError
    from roll_batching.losses.denominators import local_counts

    data = rollouts(apart=False).select(range(5)).without("rollout_ids")
    if ids is not None:
        data = data.with_fields({"rollout_ids": torch.tensor(ids)}, {"rollout_ids": "sample"})
    with pytest.raises(DataError) as caught:
        local_counts(data, ("response_mask",), rollouts=True)
    assert said in str(caught.value)


def test_a_loss_of_your_own_declares_that_it_reads_rollouts() -> None:
    from roll_batching.errors import LossError
    from roll_batching.losses import PolicyLoss
    from tests.losses.formulas import batch, run

    with pytest.raises(LossError, match="does not declare: set its `rollouts` to True"):
        run(PolicyLoss(aggregation=lambda view, x: view.rollout_mean(x) + view.rollout_token_mean(x)), batch())
