"""What a user can get wrong around a step: a clear error on every rank, before anything hangs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.ranks import run_ranks

pytestmark = pytest.mark.bad_input

SECONDS = 60


def _strategy(**options: Any) -> Any:
    from roll_batching.strategy import MegatronTrainStrategy
    from tests.support.models import fill, worker_config

    strategy = MegatronTrainStrategy(worker_config("packed", 48, **options))
    strategy.initialize()
    fill(strategy.chunks, 61)
    return strategy


def _batch(strategy: Any, count: int = 8, longest: int = 40) -> Any:
    from tests.support.models import random_batch

    whole = random_batch(1, count, longest)
    return whole.select(torch.arange(strategy.layout.dp_rank, len(whole), strategy.layout.dp_size))


def _weights(strategy: Any) -> float:
    from roll_batching.modeling.head import gpt_of

    return sum(float(p.detach().double().sum()) for p in gpt_of(strategy.chunks[0]).parameters())


def attempt(case: str) -> tuple[str, str, bool]:
    """(error class, message, whether a good step still works, with weights and times untouched by the bad one)."""
    from roll_batching.errors import RollBatchingError
    from roll_batching.losses import SFTLoss
    from roll_batching.samples import distribute, gather_lengths

    strategy = _strategy()
    before = _weights(strategy)
    try:
        CASES[case](strategy)
    except RollBatchingError as error:
        caught = type(error).__name__, str(error)
    else:
        raise AssertionError(f"{case} raised nothing")
    untouched = _weights(strategy) == before
    local = _batch(strategy)
    plan = strategy.plan(gather_lengths(local))
    good = strategy.train_step(distribute(local, plan), plan, SFTLoss())
    own_times = sum(seconds for phase, seconds in good.phases.items() if phase != "plan") <= good.seconds
    return *caught, untouched and own_times and good.loss == good.loss and not good.skipped


def _train(strategy: Any, batch: Any, loss: Any = None) -> None:
    from roll_batching.losses import SFTLoss
    from roll_batching.samples import distribute, gather_lengths

    plan = strategy.plan(gather_lengths(batch))
    strategy.train_step(distribute(batch, plan), plan, loss or SFTLoss())


def _too_long(strategy: Any) -> None:
    _train(strategy, _batch(strategy, longest=60))


class _Loss:
    needs, masks = {"log_probs"}, ("response_mask",)

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self.make = make

    def token_loss(self, tokens: Any) -> Any:
        return self.make(tokens)


def _nan_loss(strategy: Any) -> None:
    """NaN from one sample's advantage: that sample is named."""
    batch = _batch(strategy)
    advantages = torch.where(batch.lengths == 40, float("nan"), batch["advantages"])  # the longest, on one rank
    from roll_batching.losses import PolicyLoss

    _train(strategy, batch.with_fields({"advantages": advantages}, {"advantages": "sample"}), PolicyLoss())


def _wrong_shape(strategy: Any) -> None:
    from roll_batching.losses import LossOutput

    _train(strategy, _batch(strategy), _Loss(lambda tokens: LossOutput(tokens.log_probs)))


def _no_gradient(strategy: Any) -> None:
    from roll_batching.losses import LossOutput

    _train(strategy, _batch(strategy), _Loss(lambda tokens: LossOutput(tokens.mean(tokens.log_probs.detach()))))


def _not_an_output(strategy: Any) -> None:
    _train(strategy, _batch(strategy), _Loss(lambda tokens: tokens.mean(tokens.log_probs)))


def _undeclared_mask(strategy: Any) -> None:
    from roll_batching.losses import LossOutput

    _train(strategy, _batch(strategy), _Loss(lambda t: LossOutput(t.mean(t.log_probs, mask="old_log_probs"))))


def _missing_mask(strategy: Any) -> None:
    _train(strategy, _batch(strategy).without(["response_mask"]))


def _plan_differs(strategy: Any) -> None:
    from roll_batching.losses import SFTLoss
    from roll_batching.samples import gather_lengths
    from tests.support.models import random_batch

    batch = random_batch(1, 8, 30)
    table = gather_lengths(batch.select(torch.arange(strategy.layout.dp_rank, 8, 2)))
    order = table.lengths.copy()
    if strategy.layout.dp_rank:
        order[0] += 1
    from dataclasses import replace

    plan = strategy.plan(replace(table, lengths=order))
    strategy.train_step(batch, plan, SFTLoss())


def _not_distributed(strategy: Any) -> None:
    from roll_batching.losses import SFTLoss
    from roll_batching.samples import gather_lengths

    local = _batch(strategy)
    strategy.train_step(local.select([0]), strategy.plan(gather_lengths(local)), SFTLoss())


def _raises_before(strategy: Any) -> None:
    """One rank's batch lacks a field that the others have: it fails while packing, alone."""
    from roll_batching.losses import SFTLoss
    from roll_batching.samples import distribute, gather_lengths

    local = _batch(strategy)
    plan = strategy.plan(gather_lengths(local))
    placed = distribute(local, plan)
    if strategy.layout.dp_rank == 1:
        placed = placed.without(["input_ids"])
    strategy.train_step(placed, plan, SFTLoss())


def _other_layout(strategy: Any) -> None:
    from roll_batching.losses import SFTLoss
    from roll_batching.planning import PlanConstraints, plan_step
    from roll_batching.samples import gather_lengths

    local = _batch(strategy)
    table = gather_lengths(local)
    plan = plan_step(table.lengths, PlanConstraints(dp_size=1, max_tokens=48), ids=table.ids)
    strategy.train_step(local, plan, SFTLoss())


CASES: dict[str, Callable[[Any], None]] = {
    "a sequence longer than the cap": _too_long,
    "a loss that is NaN for one sample": _nan_loss,
    "a loss of the wrong shape": _wrong_shape,
    "a loss without a gradient": _no_gradient,
    "a loss that is no LossOutput": _not_an_output,
    "a reduction over an undeclared mask": _undeclared_mask,
    "a mask that the batch does not have": _missing_mask,
    "plans that differ between ranks": _plan_differs,
    "samples that were not distributed": _not_distributed,
    "a rank that raises before the schedule": _raises_before,
    "a plan made for another layout": _other_layout,
}

SAYS = {
    "a sequence longer than the cap": ("PlanError", ["60", "48"]),
    "a loss that is NaN for one sample": ("LossError", ["nan for sample 1014:"]),
    "a loss of the wrong shape": ("LossError", ["shape (", "view's mean"]),
    "a loss without a gradient": ("LossError", ["without a gradient"]),
    "a loss that is no LossOutput": ("LossError", ["returned Tensor", "LossOutput(loss, metrics)"]),
    "a reduction over an undeclared mask": ("LossError", ["'old_log_probs'", "masks"]),
    "a mask that the batch does not have": ("RankError", ["response_mask", "input_ids"]),
    "plans that differ between ranks": ("RankError", ["ranks differ in the plan", "on rank 0", "on rank 1"]),
    "samples that were not distributed": ("RankError", ["distribute(batch, plan)"]),
    "a rank that raises before the schedule": ("RankError", ["rank 1:", "input_ids"]),
    "a plan made for another layout": ("RankError", ["dp_size=1", "2"]),
}


@pytest.mark.parametrize("case", CASES)
def test_every_rank_raises_the_same_clear_error(case: str, report: Callable[[str], None]) -> None:
    outcomes = run_ranks(2, "tests.strategy.test_bad_input:attempt", case, timeout=SECONDS)
    kind, parts = SAYS[case]
    messages = {message for _, message, _ in outcomes}
    assert {name for name, _, _ in outcomes} == {kind}, messages
    assert len(messages) == 1
    for part in parts:
        assert part in next(iter(messages))
    assert all(fine for _, _, fine in outcomes)
    report(f"{case}: {kind}: {next(iter(messages))[:150]}")


def raise_inside(_: None) -> None:
    from roll_batching.losses import LossOutput

    strategy = _strategy()

    def fail(tokens: Any) -> Any:
        if strategy.layout.dp_rank == 1:
            raise ZeroDivisionError("the user's own mistake")
        return LossOutput(-tokens.mean(tokens.log_probs))

    _train(strategy, _batch(strategy), _Loss(fail))


def test_a_rank_that_raises_inside_the_schedule_ends_the_job(report: Callable[[str], None]) -> None:
    outcomes = run_ranks(2, "tests.strategy.test_bad_input:raise_inside", check=False, timeout=SECONDS, grace=5)
    assert outcomes[1].returncode == 1
    assert "the user's own mistake" in outcomes[1].output
    assert outcomes[0].returncode != 0
    report("a rank that raises inside the schedule: its own traceback, and the job ends")


def few_samples(_: None) -> tuple[float, int, str]:
    import logging

    from roll_batching.losses import SFTLoss
    from roll_batching.samples import SampleBatch, distribute, gather_lengths

    class Kept(logging.Handler):
        text = ""

        def emit(self, record: logging.LogRecord) -> None:
            self.text += record.getMessage()

    kept = Kept()
    logging.getLogger("roll_batching").addHandler(kept)
    strategy = _strategy()
    from tests.support.models import random_batch

    whole = random_batch(1, 8, 30)
    one: SampleBatch = whole.select([int(whole.lengths.argmax())] if strategy.layout.dp_rank == 0 else [])
    plan = strategy.plan(gather_lengths(one))
    result = strategy.train_step(distribute(one, plan), plan, SFTLoss())
    return result.loss, plan.report.fillers, kept.text


def test_fewer_samples_than_ranks_trains_with_fillers_and_a_notice(report: Callable[[str], None]) -> None:
    outcomes = run_ranks(2, "tests.strategy.test_bad_input:few_samples", timeout=SECONDS)
    assert all(loss > 0 and fillers == 1 for loss, fillers, _ in outcomes)
    assert "filler" in outcomes[0][2]
    report(f"fewer samples than data-parallel ranks: no error; notice: {outcomes[0][2]}")


def longer_than_the_table(_: None) -> list[str]:
    """What a model of 32 learned positions says of a sample of 40 tokens, and of a prompt with a long answer, that one
    rank has; then it takes a good step."""
    from roll_batching.distributed.parallel_layout import make_layout, start_processes
    from roll_batching.errors import RollBatchingError
    from roll_batching.losses import SFTLoss
    from roll_batching.planning import BatchingSpec, ParallelDims
    from roll_batching.samples import SampleBatch, distribute, gather_lengths
    from roll_batching.settings import BatchingConfig
    from roll_batching.strategy import GenerationSettings, MegatronTrainStrategy
    from tests.support.own_model import build

    make_layout(ParallelDims(dp_size=2), start_processes())
    one = BatchingSpec(mode="packed", max_tokens=48)
    parts = build("packed", learned_positions=32)
    strategy = MegatronTrainStrategy.from_parts(*parts, BatchingConfig(train=one, infer=one), vocab_size=61)
    said = []

    def attempted(call: Callable[[], Any]) -> None:
        try:
            call()
        except RollBatchingError as error:
            said.append(str(error))

    attempted(lambda: _train(strategy, _batch(strategy, longest=40)))
    local = _batch(strategy, longest=40)
    plan = strategy.plan(gather_lengths(local), forward=True)
    attempted(lambda: strategy.compute_log_probs(distribute(local, plan), plan))
    length = 30 if strategy.layout.dp_rank else 3
    prompts = SampleBatch.from_lists({"input_ids": [torch.ones(length, dtype=torch.int64)]}, {"input_ids": "token"})
    attempted(lambda: strategy.generate(prompts, GenerationSettings(max_new_tokens=4, eos_token_id=0)))
    local = _batch(strategy, longest=32)
    plan = strategy.plan(gather_lengths(local))
    assert strategy.train_step(distribute(local, plan), plan, SFTLoss()).loss > 0
    return said


def test_a_sequence_longer_than_the_table_of_positions_is_refused_on_every_rank() -> None:
    first, second = run_ranks(2, "tests.strategy.test_bad_input:longer_than_the_table", timeout=SECONDS)
    assert first == second and len(first) == 3
    assert all("40 positions" in message and "has learned 32" in message for message in first[:2])
    assert first[2].startswith("generate: rank 1:") and "34 positions" in first[2]
