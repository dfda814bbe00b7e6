"""Steps of the strategies: log-probs in order, first ratios, counts, phases, skipped steps, own losses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.models import MODES
from tests.support.ranks import run_ranks


def _strategy(mode: str = "packed", cap: int = 64, cls: Any = None, **options: Any) -> Any:
    from roll_batching.strategy import MegatronTrainStrategy
    from tests.support.models import fill, worker_config

    strategy = (cls or MegatronTrainStrategy)(worker_config(mode, cap, **options))
    strategy.initialize()
    fill(strategy.chunks, 61)
    return strategy


def _mine(strategy: Any, whole: Any) -> Any:
    return whole.select(torch.arange(strategy.layout.dp_rank, len(whole), strategy.layout.dp_size))


def log_probs_in_order(mode: str) -> tuple[float, float]:
    from roll_batching.samples import collect, distribute, gather_lengths
    from tests.support.models import random_batch
    from tests.support.reference import sequence_statistics, stock_model

    strategy = _strategy(mode)
    local = _mine(strategy, random_batch(5, 13, 40))
    plan = strategy.plan(gather_lengths(local), forward=True)
    placed = strategy.forward(distribute(local, plan), plan, ("log_probs", "entropy"))
    found = collect(placed, plan)
    assert found.ids.tolist() == local.ids.tolist()
    model = stock_model()
    gaps = [0.0, 0.0]
    for i, tokens in enumerate(local.to_lists("input_ids")):
        with torch.no_grad():
            expected = sequence_statistics(model, tokens)
        for k, name in enumerate(("log_probs", "entropy")):
            row = found.to_lists(name)[i]
            assert float(row[-1]) == 0.0
            if len(row) > 1:
                gaps[k] = max(gaps[k], float((row[:-1] - expected[k]).abs().max()))
    return gaps[0], gaps[1]


@pytest.mark.parametrize("mode", MODES)
def test_log_probs_come_back_in_the_callers_order(mode: str) -> None:
    for gaps in run_ranks(2, "tests.strategy.test_steps:log_probs_in_order", mode):
        assert max(gaps) < 2e-5


def first_ratio(mode: str) -> dict[str, tuple[float, float]]:
    from roll_batching.losses import LossOutput, Max, Min, PolicyLoss
    from roll_batching.samples import distribute, gather_lengths
    from tests.support.models import random_batch

    class Ratios(PolicyLoss):
        def token_loss(self, tokens: Any) -> Any:
            output = super().token_loss(tokens)
            ratio = (tokens.log_probs - tokens["old_log_probs"]).exp()[tokens.mask()]
            if not len(ratio):
                return output
            return LossOutput(output.loss, {"low": Min(ratio.min().detach()), "high": Max(ratio.max().detach())})

    found = {}
    strategy = _strategy(mode)
    local = _mine(strategy, random_batch(7, 15, 40)).without(["old_log_probs"])
    for plan_name in ("train", "own"):
        table = gather_lengths(local)
        train_plan = strategy.plan(table)
        plan = train_plan if plan_name == "train" else strategy.plan(table, forward=True)
        placed = distribute(local, plan)
        old = strategy.compute_log_probs(placed, plan, masks=("response_mask",))
        placed = placed.with_fields({"old_log_probs": old["log_probs"]}, {"old_log_probs": "next_token"})
        if plan_name == "own":
            from roll_batching.samples import collect

            placed = distribute(collect(placed, plan), train_plan)
        metrics = strategy.train_step(placed, train_plan, Ratios()).metrics
        found[plan_name] = (metrics["low"], metrics["high"])
        from tests.support.models import fill

        fill(strategy.chunks, 61)
    return found


@pytest.mark.parametrize("mode", MODES)
def test_the_first_ratio_is_exactly_one_on_the_shared_plan(mode: str) -> None:
    found = run_ranks(2, "tests.strategy.test_steps:first_ratio", mode)[0]
    assert found["train"] == (1.0, 1.0)
    assert all(abs(r - 1) < 1e-4 for r in found["own"])


def on_policy(_: None) -> tuple[float, float]:
    """Without old log-probs the policy loss uses the detached current ones."""
    from roll_batching.losses import PolicyLoss
    from roll_batching.samples import distribute, gather_lengths
    from tests.support.models import random_batch

    strategy = _strategy()
    local = random_batch(7, 9, 40).without(["old_log_probs"])
    plan = strategy.plan(gather_lengths(local))
    result = strategy.train_step(distribute(local, plan), plan, PolicyLoss())
    return result.metrics["ratio_max"], result.metrics["approx_kl"]


def test_strictly_on_policy_needs_no_old_log_probs() -> None:
    assert run_ranks(1, "tests.strategy.test_steps:on_policy")[0] == (1.0, 0.0)


def left_out_groups(_: None) -> list[float]:
    """A step with zero-advantage samples left out, under counts of all, has the gradient of the whole step."""
    from roll_batching.losses import PolicyLoss
    from roll_batching.samples import distribute, gather_lengths
    from tests.support.models import random_batch, whole_gradients, worst_difference

    strategy = _strategy()
    whole = random_batch(3, 14, 40)
    advantages = whole["advantages"].clone()
    advantages[4:9] = 0.0
    whole = whole.with_fields({"advantages": advantages}, {"advantages": "sample"})
    local = _mine(strategy, whole)
    loss = PolicyLoss()

    def gradients(batch: Any, counts: Any) -> Any:
        plan = strategy.plan(gather_lengths(batch))
        result = strategy.train_step(distribute(batch, plan), plan, loss, counts)
        found = whole_gradients(strategy.chunks, 61, 0, False)
        from tests.support.models import fill

        fill(strategy.chunks, 61)
        return result.loss, found

    kept = local.select((local["advantages"] != 0).nonzero()[:, 0])
    all_loss, all_gradients = gradients(local, None)
    kept_loss, kept_gradients = gradients(kept, strategy.count(local, loss))
    wrong_loss, _ = gradients(kept, None)
    return [all_loss, kept_loss, wrong_loss, worst_difference(kept_gradients, all_gradients)[0]]


def test_samples_left_out_still_count() -> None:
    all_loss, kept_loss, wrong_loss, gap = run_ranks(2, "tests.strategy.test_steps:left_out_groups")[0]
    assert kept_loss == pytest.approx(all_loss, rel=1e-5)
    assert gap < 1e-5
    assert abs(wrong_loss - all_loss) > 1e-3  # without the counts it would differ


def skipped_step(_: None) -> tuple[bool, int, bool, float, float]:
    """A finite loss whose gradient overflows: the weights stay, the step is counted."""
    from roll_batching.losses import LossOutput
    from roll_batching.modeling.head import gpt_of
    from roll_batching.samples import distribute, gather_lengths
    from tests.support.models import random_batch

    class Overflowing:
        needs, masks = {"log_probs"}, ("response_mask",)

        def token_loss(self, tokens: Any) -> Any:
            x = tokens.mean(tokens.log_probs)
            return LossOutput(x * 1e30 * 1e-30 + ((x - x.detach()) * 1e30) * 1e30)

    strategy = _strategy()
    local = _mine(strategy, random_batch(1, 8, 30))
    plan = strategy.plan(gather_lengths(local))
    before = [p.detach().clone() for p in gpt_of(strategy.chunks[0]).parameters()]
    lr = strategy.optimizer.param_groups[0]["lr"]
    result = strategy.train_step(distribute(local, plan), plan, Overflowing())
    after = list(gpt_of(strategy.chunks[0]).parameters())
    same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return result.skipped, strategy.skipped_steps, same, result.grad_norm, lr


def test_a_gradient_that_is_not_finite_skips_the_step() -> None:
    for skipped, count, same, norm, _ in run_ranks(2, "tests.strategy.test_steps:skipped_step"):
        assert skipped and count == 1 and same and norm != norm


def loss_as_megatron_scales_it(_: None) -> list[float]:
    from roll_batching.losses import SFTLoss
    from roll_batching.samples import distribute, gather_lengths
    from tests.support.models import random_batch, whole_gradients

    norms = []
    for per_token in (True, False):
        for apply in (True, False):
            strategy = _strategy(cap=48, megatron={"calculate_per_token_loss": per_token}, apply_loss_scale=apply)
            local = _mine(strategy, random_batch(2, 12, 40))
            plan = strategy.plan(gather_lengths(local))
            strategy.train_step(distribute(local, plan), plan, SFTLoss())
            gradient = whole_gradients(strategy.chunks, 61, 0, False)["output_layer.weight"]
            norms.append(float(gradient.norm()) * (1 if apply else plan.num_micro_batches * 2))
    return norms


def test_apply_loss_scale_false_divides_by_micro_batches_and_ranks() -> None:
    norms = run_ranks(2, "tests.strategy.test_steps:loss_as_megatron_scales_it")[0]
    assert norms == pytest.approx([norms[0]] * 4, rel=1e-5)


def schedule_and_phases(_: None) -> list[float]:
    from roll_batching.losses import SFTLoss
    from roll_batching.samples import distribute, gather_lengths
    from roll_batching.settings import TrainingArgs
    from tests.support.models import random_batch

    training = {"learning_rate": 1e-2, "lr_scheduler_type": "linear", "warmup_steps": 2, "max_steps": 6}
    strategy = _strategy(training=training)
    batch = random_batch(2, 6, 30)
    plan = strategy.plan(gather_lengths(batch))
    rates = [strategy.train_step(distribute(batch, plan), plan, SFTLoss()).lr for _ in range(7)]
    strategy.start_phase(TrainingArgs(learning_rate=5e-4))
    return [*rates, strategy.train_step(distribute(batch, plan), plan, SFTLoss()).lr]


def test_learning_rate_warms_up_decays_and_starts_anew() -> None:
    rates = run_ranks(1, "tests.strategy.test_steps:schedule_and_phases")[0]
    assert rates == pytest.approx([0, 0.005, 0.01, 0.0075, 0.005, 0.0025, 0.0, 5e-4])


def own_loss(_: None) -> tuple[float, float]:
    from roll_batching.losses import LossOutput, SFTLoss
    from roll_batching.samples import distribute, gather_lengths
    from roll_batching.strategy import MegatronTrainStrategy
    from tests.support.models import random_batch

    class Mine(MegatronTrainStrategy):
        needs = {"log_probs"}
        masks = ("response_mask",)

        def token_loss(self, tokens: Any) -> Any:
            return LossOutput(-tokens.mean(tokens.log_probs))

    strategy = _strategy(cls=Mine)
    batch = random_batch(4, 9, 30)
    plan = strategy.plan(gather_lengths(batch))
    local = distribute(batch, plan)
    value = strategy.evaluate(local, plan, SFTLoss())["loss"]
    return strategy.train_step(local, plan).loss, value


def test_a_subclass_is_its_own_loss_and_evaluate_agrees() -> None:
    loss, evaluated = run_ranks(1, "tests.strategy.test_steps:own_loss")[0]
    assert loss == pytest.approx(evaluated, rel=1e-6)
