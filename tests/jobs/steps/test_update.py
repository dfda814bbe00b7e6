"""`train_on_rollouts` on real ranks: the same samples give the same updates, whoever holds them."""

from __future__ import annotations

import time

import numpy as np
import pytest

from tests.jobs.rl.jobs import settings
from tests.support.ranks import RanksFailed, run_ranks

SAMPLES, GROUP = 12, 3


def train(payload):
    """On a rank: two updates on fixed samples, dealt to the ranks as the payload says."""
    import torch

    from roll_batching.jobs.config import JobConfig
    from roll_batching.jobs.steps.update import train_on_rollouts
    from roll_batching.losses import PolicyLoss, mask_overlong
    from roll_batching.samples import SampleBatch
    from roll_batching.strategy import MegatronTrainStrategy

    config = JobConfig.model_validate(payload["job"])
    strategy = MegatronTrainStrategy(config.actor_train, seed=1)
    strategy.initialize()
    draw = np.random.default_rng(0)
    rows = [draw.integers(0, 39, n).tolist() for n in draw.integers(3, 40, SAMPLES)]
    masks = [[i >= 2 for i in range(len(row))] for row in rows]
    advantages = draw.normal(size=SAMPLES)
    advantages[GROUP : 2 * GROUP] = 0.0
    batch = SampleBatch.from_lists(
        {"input_ids": rows, "response_mask": masks, "advantages": advantages.tolist()},
        {"input_ids": "token", "response_mask": "token", "advantages": "sample"},
    )
    mine = np.flatnonzero(np.arange(SAMPLES) % strategy.layout.dp_size == strategy.layout.dp_rank)
    home = batch.select(mine[:: payload.get("order", 1)])
    if "drawn_with" in payload:
        drawn_with = torch.full((home.num_tokens,), payload["drawn_with"])
        home = home.with_fields({"rollout_log_probs": drawn_with}, {"rollout_log_probs": "next_token"})
    left_out = np.isin(np.arange(SAMPLES), payload["overlong"])
    home = mask_overlong(home, torch.from_numpy(left_out[home.ids.numpy()]))
    left_out |= advantages == 0

    def weights():
        parameters = [p.detach().flatten() for chunk in strategy.chunks for p in chunk.parameters()]
        return torch.cat(parameters).double().numpy()

    forwards = []
    compute = strategy.compute_log_probs

    def seen(local, plan, **options):
        forwards.append(sorted(plan.ids.tolist()))
        return compute(local, plan, **options)

    strategy.compute_log_probs = seen
    if "steps" in payload:
        wait_for_the_next_plan(strategy, payload["steps"])
    before = weights()
    updates = list(
        train_on_rollouts(
            strategy,
            home,
            PolicyLoss(),
            mini_batch_size=payload.get("size", 8),
            epochs=payload.get("epochs", 1),
            batch_balance=payload.get("balance", False),
            seed=5,
            idle_ids=np.flatnonzero(left_out) if payload["skip"] else None,
        )
    )
    return {
        "forwards": forwards,
        "ranks": [
            [sorted(int(plan.ids[i]) for pack in packs for i in pack.samples) for packs in plan.micro_batches]
            for plan, _ in updates
        ],
        "members": [sorted(plan.ids.tolist()) for plan, _ in updates],
        "loss": [result.loss for _, result in updates],
        "grad_norm": [result.grad_norm for _, result in updates],
        "ratio_max": [result.metrics["ratio_max"] for _, result in updates],
        "moved": weights() - before,
    }


def wait_for_the_next_plan(strategy, count):
    """No step of `count` begins before the one after it is planned, which takes a thread beside it."""
    plan, train_step = strategy.plan, strategy.train_step
    planned, trained = [], []

    def plans(*arguments, **options):
        found = plan(*arguments, **options)
        planned.append(found)
        return found

    def steps(*arguments, **options):
        trained.append(arguments)
        until = time.monotonic() + 60
        while len(planned) < min(len(trained) + 1, count):
            assert time.monotonic() < until, f"step {len(trained)} trains, and the next is not planned"
            time.sleep(0.001)
        return train_step(*arguments, **options)

    strategy.plan, strategy.train_step = plans, steps


def every_kind(payload):
    """On a rank: the row of two updates, of 8 and of 4 samples, under a loss with a metric of every kind."""
    import torch

    from roll_batching.jobs.config import JobConfig
    from roll_batching.jobs.rollouts.step_metrics import update_metrics
    from roll_batching.jobs.steps.update import train_on_rollouts
    from roll_batching.losses import LossOutput, Max, Mean, Min, Sum
    from roll_batching.samples import SampleBatch
    from roll_batching.strategy import MegatronTrainStrategy

    class EveryKind:
        needs, masks = {"log_probs"}, ("response_mask",)

        def token_loss(self, tokens):
            values = tokens["value"][tokens.mask()]
            metrics = {
                "total_max": Sum(values.sum()),  # names say nothing: this one adds up
                "mean_min": Mean(values.sum(), torch.tensor(len(values))),
                "largest": Max(values.max()),
                "smallest": Min(values.min()),
            }
            if tokens["value"].max() == payload["top"]:
                metrics["seen"] = Sum(torch.ones(()))
            return LossOutput(-tokens.mean(tokens.log_probs), metrics)

    strategy = MegatronTrainStrategy(JobConfig.model_validate(payload["job"]).actor_train, seed=1)
    strategy.initialize()
    batch = SampleBatch.from_lists(
        {"input_ids": payload["rows"], "response_mask": payload["masks"], "value": payload["values"]},
        {"input_ids": "token", "response_mask": "token", "value": "token"},
    )
    home = batch.select(np.arange(strategy.layout.dp_rank, SAMPLES, strategy.layout.dp_size))
    updates = list(train_on_rollouts(strategy, home, EveryKind(), mini_batch_size=8, seed=5))
    row = update_metrics(updates)
    row = {name: row[name] for name in ("total_max", "mean_min", "largest", "smallest", "seen")}
    return [plan.report.num_micro_batches for plan, _ in updates], row


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_row_of_several_updates_joins_each_metric_by_its_kind(tmp_path, ranks):
    draw = np.random.default_rng(0)
    lengths = draw.integers(3, 40, SAMPLES)
    values = [np.round(draw.normal(10, 5, n), 2).astype(np.float32) for n in lengths]
    values[3][2] = 100.0
    masks = [np.arange(n) >= 2 for n in lengths]
    payload = {
        "job": settings(tmp_path, warmup=None, max_steps=1),
        "rows": [draw.integers(0, 39, n) for n in lengths],
        "masks": masks,
        "values": values,
        "top": 100.0,
    }
    counted = np.concatenate([v[m] for v, m in zip(values, masks, strict=True)]).astype(np.float64)
    outcomes = run_ranks(ranks, "tests.jobs.steps.test_update:every_kind", payload)
    assert all(outcome == outcomes[0] for outcome in outcomes)
    micro_batches, row = outcomes[0]
    assert len(micro_batches) == 2 and max(micro_batches) * ranks > 1
    assert row["total_max"] == pytest.approx(counted.sum(), rel=1e-5)
    assert row["mean_min"] == pytest.approx(counted.mean(), rel=1e-5)
    assert (row["largest"], row["smallest"]) == (counted.max(), counted.min())
    assert row["seen"] == 1.0, "a metric that some micro-batches have"


def run(tmp_path, ranks, skip=False, overlong=(), **payload):
    keys = {"actor_train__logprob_plan": payload.pop("logprob_plan", "train"), **payload.pop("keys", {})}
    job = settings(tmp_path, warmup=None, max_steps=1, **{key: value for key, value in keys.items() if value})
    return run_ranks(
        ranks, "tests.jobs.steps.test_update:train", {"job": job, "skip": skip, "overlong": overlong, **payload}
    )[0]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    return run(tmp_path_factory.mktemp("one"), 1)


def same(left, right, tolerance=1e-5):
    assert left["loss"] == pytest.approx(right["loss"], rel=tolerance, abs=1e-7)
    assert left["grad_norm"] == pytest.approx(right["grad_norm"], rel=tolerance)
    # Adam divides by the gradient's own size, so rounding shows most where a gradient is nearly zero.
    gap = np.linalg.norm(left["moved"] - right["moved"]) / np.linalg.norm(right["moved"])
    assert gap < 100 * tolerance, gap
    return gap


@pytest.mark.equality
@pytest.mark.parametrize(("ranks", "order"), [(2, 1), (3, 1), (2, -1)])
def test_who_holds_the_samples_changes_nothing(tmp_path, one_rank, ranks, order, report):
    got = run(tmp_path, ranks, order=order)
    assert got["members"] == one_rank["members"], "membership depends on the seed alone"
    gap = same(got, one_rank)
    report(f"change of the weights by two GRPO updates, DP {ranks} against DP 1: {gap:.1e}")


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_first_ratio_is_exactly_one(tmp_path, ranks):
    got = run(tmp_path, ranks)
    assert got["ratio_max"][0] == 1.0
    assert got["ratio_max"][1] != 1.0, "the second mini-batch meets weights that have moved"


def test_idle_groups_change_nothing_but_the_work(tmp_path, one_rank):
    got = run(tmp_path, 2, skip=True)
    same(got, one_rank)
    idle = set(range(GROUP, 2 * GROUP))
    assert [sorted(set(m) - idle) for m in one_rank["members"]] == got["members"]


def test_overlong_responses_count_nowhere_whether_computed_or_not(tmp_path, one_rank):
    overlong = [0, 7, 8, 9]
    computed = run(tmp_path, 2, overlong=overlong)
    assert computed["loss"] != pytest.approx(one_rank["loss"])
    got = run(tmp_path, 2, skip=True, overlong=overlong)
    same(got, computed)
    absent = {*overlong, *range(GROUP, 2 * GROUP)}
    assert [sorted(set(m) - absent) for m in one_rank["members"]] == got["members"]


def test_a_second_epoch_has_other_members_and_the_same_old_log_probs(tmp_path):
    got = run(tmp_path, 2, epochs=2)
    assert got["members"][0] != got["members"][2]
    assert sorted(sum(got["members"][2:], [])) == list(range(SAMPLES))


def test_the_next_mini_batch_is_planned_while_one_trains(tmp_path):
    assert len(run(tmp_path, 2, epochs=2, logprob_plan="rollout", drawn_with=-1.0, steps=4)["members"]) == 4


def test_batch_balance_keeps_samples_on_their_ranks(tmp_path):
    """Equal counts on the ranks of the whole step; a rank's share of every mini-batch is drawn among its own."""
    got = run(tmp_path, 2, epochs=2, balance=True, logprob_plan="own")
    assert [[len(rank) for rank in update] for update in got["ranks"]] == [[4, 4], [2, 2]] * 2
    first, second = (sorted(a + b) for a, b in zip(*got["ranks"][:2], strict=True))
    assert [sorted(a + b) for a, b in zip(*got["ranks"][2:], strict=True)] == [first, second]
    assert sorted(first + second) == list(range(SAMPLES)) and got["ranks"][0] != got["ranks"][2]


@pytest.mark.parametrize("cap", [128, 512])
def test_a_cap_of_passes_without_gradient_is_used_where_it_differs(tmp_path, cap):
    forward = {"actor_train__sequence_packing_args__max_packed_sequence_length_forward": cap}
    got = run(tmp_path, 1, logprob_plan=None, keys=forward)
    assert got["forwards"] == (got["members"] if cap == 128 else [list(range(SAMPLES))])
    assert (got["ratio_max"][0] == 1.0) if cap == 128 else got["ratio_max"][0] == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("plan", ["train", "own", "none"])
def test_old_log_probs_are_computed_under_the_plan_that_was_asked_for(tmp_path, plan):
    got = run(tmp_path, 1, logprob_plan=plan, size=SAMPLES if plan == "none" else 8)
    assert got["forwards"] == {"train": got["members"], "own": [list(range(SAMPLES))], "none": []}[plan]


def test_without_old_log_probs_every_ratio_is_one(tmp_path):
    assert run(tmp_path, 1, logprob_plan="none", size=SAMPLES)["ratio_max"] == [1.0]


@pytest.mark.bad_input
@pytest.mark.parametrize("changes", [{"size": 8}, {"size": SAMPLES, "epochs": 2}])
def test_several_steps_without_old_log_probs_are_refused(tmp_path, changes):
    with pytest.raises(RanksFailed, match="12 samples of a rollout make 2 optimizer steps"):
        run(tmp_path, 2, logprob_plan="none", **changes)


@pytest.mark.streams
def test_ratios_are_taken_against_the_policy_that_drew_the_samples(tmp_path):
    """A sampler that was certain of every token, and one that gave each a tenth."""
    certain = run(tmp_path, 1, logprob_plan="rollout", drawn_with=0.0)
    assert certain["forwards"] == [], "no pass for them"
    assert 0 < certain["ratio_max"][0] < 1, "the largest probability of a token"
    unsure = run(tmp_path, 1, logprob_plan="rollout", drawn_with=-np.log(10.0))
    assert unsure["ratio_max"][0] == pytest.approx(10 * certain["ratio_max"][0], rel=1e-5)
