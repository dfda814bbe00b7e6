"""Scored rollouts from a queue to tensors and plans: order, staleness, dead producers, positions, denominators."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import threading
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from roll_batching.errors import DataError, PlanError
from roll_batching.jobs.streams import (
    DataCollatorForRollout,
    FixedCountBatcher,
    RolloutQueueDataset,
    RolloutSample,
    TokenBudgetBatcher,
    rollout_step,
)
from roll_batching.jobs.streams.rollout_queue import END
from roll_batching.planning import PlanConstraints
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.streams

PAGE = Path(__file__).resolve().parents[3] / "docs" / "streams.md"


def sample(number=0, length=4, version=0, **changes):
    values = {
        "input_ids": [number % 50 + 1] * length,
        "completion_mask": [0] + [1] * (length - 1),
        "old_log_probs": [0.0] + [-0.5] * (length - 1),
        "advantage": number / 10,
        "group_id": number,
        "model_version": version,
        "metrics": {"reward": float(number)},
    }
    return RolloutSample(**(values | changes))


def filled(*samples):
    result = queue.Queue()
    for one in samples:
        result.put(one)
    return result


# ---- the queue


def test_samples_come_in_order_and_stale_ones_are_dropped_and_counted():
    items = filled(*[sample(i, version=v) for i, v in enumerate((0, 3, 1, 5, 2))], END)
    dataset = RolloutQueueDataset(items, lambda: 5, max_staleness=3)
    assert [one.group_id for one in dataset] == [1, 3, 4]
    row = dataset.take_metrics()
    assert (row["dropped_samples"], row["staleness_max"]) == (2, 3)
    assert row["staleness_mean"] == pytest.approx((2 + 0 + 3) / 3)
    assert dataset.take_metrics()["dropped_samples"] == 0, "of each step its own"


def test_the_depth_of_the_queue_and_the_wait_for_it_are_told():
    items = queue.Queue(maxsize=4)

    def produce():
        time.sleep(0.3)
        for i in range(6):
            items.put(sample(i))  # a flood: from the fifth on it waits

    producer = threading.Thread(target=produce, daemon=True)
    producer.start()
    dataset = RolloutQueueDataset(items, lambda: 0, poll_interval_s=0.05)
    reading = iter(dataset)
    next(reading)
    time.sleep(0.2)
    row = dataset.take_metrics()
    assert row["queue_depth"] == 4 and producer.is_alive(), "backpressure"
    assert 0.2 < row["queue_wait_seconds"] < 5
    next(reading)
    assert dataset.take_metrics()["queue_wait_seconds"] < 0.1


def die_after_two(items, ready):
    for i in range(2):
        items.put(sample(i))
    ready.set()
    time.sleep(60)


def test_a_producer_that_is_killed_is_an_error_after_all_that_it_had_sent():
    context = multiprocessing.get_context("fork")
    items, ready = context.Queue(maxsize=8), context.Event()
    producer = context.Process(target=die_after_two, args=(items, ready), daemon=True)
    producer.start()
    assert ready.wait(30)
    time.sleep(0.2)
    os.kill(producer.pid, signal.SIGKILL)

    def check_health(seconds):
        assert seconds == 30
        if not producer.is_alive():
            raise RuntimeError(f"the producer ended with {producer.exitcode}")

    dataset = RolloutQueueDataset(items, lambda: 0, check_health, stale_after_s=30, poll_interval_s=0.1)
    reading = iter(dataset)
    assert [next(reading).group_id for _ in range(2)] == [0, 1]
    with pytest.raises(RuntimeError, match="the producer ended with -9"):
        next(reading)
    items.put(sample(2))  # a new one took its place
    assert next(iter(dataset)).group_id == 2


def test_a_producer_that_stalls_is_an_error():
    dataset = RolloutQueueDataset(queue.Queue(), lambda: 0, stale_after_s=0.2, poll_interval_s=0.05)
    with pytest.raises(DataError, match=r"No rollout has come for stale_after_s=0\.2 seconds"):
        next(iter(dataset))


@pytest.mark.bad_input
def test_what_a_queue_cannot_do_is_said():
    with pytest.raises(DataError, match="max_staleness=-1"):
        RolloutQueueDataset(queue.Queue(), lambda: 0, max_staleness=-1)
    with pytest.raises(DataError, match="model_version 3, and the weights in training are of version 2"):
        next(iter(RolloutQueueDataset(filled(sample(version=3)), lambda: 2)))
    items = multiprocessing.get_context("fork").Queue()
    with pytest.raises(DataError, match="one process must read: num_workers=0"):
        list(DataLoader(RolloutQueueDataset(items, lambda: 0), batch_size=None, num_workers=1))


# ---- the page


def test_the_code_of_the_page_for_people_from_trl_runs(capsys):
    chapter = PAGE.read_text().split("\n## Coming from TRL")[1].split("\n## ")[0]
    first, second = (part.split("```")[0] for part in chapter.split("```python\n")[1:])
    space = {}
    exec(first, space)  # noqa: S102
    printed = capsys.readouterr().out
    assert printed.count("torch.Size([2, ") == 2 and "'dropped_samples': 0" in printed
    assert run_ranks(1, "tests.jobs.streams.test_rollouts:train_as_the_page_says", second)[0] == (8, 36)


def train_as_the_page_says(code):
    """On a rank: the second program of the page, with both rows of a micro-batch on it."""
    from roll_batching.strategy import MegatronTrainStrategy
    from tests.support.models import worker_config

    strategy = MegatronTrainStrategy(worker_config("packed", 64))
    strategy.initialize()
    lengths = [5, 9, 3, 7, 6, 4, 8, 2]
    rows = list(TokenBudgetBatcher([sample(i, n) for i, n in enumerate(lengths)], 1, 16))
    space = {"micro_batches": rows, "strategy": strategy}
    exec(code.replace("dp_size=2", "dp_size=1"), space)  # noqa: S102
    return len(space["batch"]), space["result"].joined_metrics["entropy"].values[1]


# ---- tensors


def batches_of(lengths, ranks=2, budget=8):
    samples = [sample(i, length) for i, length in enumerate(lengths)]
    return list(TokenBudgetBatcher(samples, ranks, budget))


def test_rows_are_concatenated_with_positions_of_their_own():
    """Sizes, positions, advantages and paddings of one micro-batch, on paper."""
    rows = [[sample(1, 3), sample(2, 2)], [asdict(sample(3, 4))]]
    tensors = DataCollatorForRollout(9, 2)([rows])  # positional, as in TRL
    assert DataCollatorForRollout(9) == DataCollatorForRollout(pad_token_id=9, num_processes=1)
    assert tensors["input_ids"].tolist() == [[2, 2, 2, 3, 3], [4, 4, 4, 4, 9]]
    assert tensors["position_ids"].tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 0]]
    assert tensors["attention_mask"].tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]]
    assert tensors["completion_mask"].tolist() == [[0, 1, 1, 0, 1], [0, 1, 1, 1, 0]]
    assert tensors["old_log_probs"].tolist() == [[0, -0.5, -0.5, 0, -0.5], [0, -0.5, -0.5, -0.5, 0]]
    expected = torch.tensor([[0.1, 0.1, 0.1, 0.2, 0.2], [0.3, 0.3, 0.3, 0.3, 0]])
    assert torch.equal(tensors["advantages"], expected)
    assert tensors["global_n_tokens"].tolist() == [6, 6]
    reward = tensors["metrics"]["reward"]
    assert reward[0].tolist() == [1, 2] and reward[1][0] == 3 and reward[1][1].isnan()


def test_a_row_without_samples_is_all_padding():
    tensors = DataCollatorForRollout(pad_token_id=9, num_processes=2)([[[sample(1, 3)], []]])
    assert tensors["input_ids"].tolist() == [[2, 2, 2], [9, 9, 9]]
    assert tensors["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 0]]


@pytest.mark.parametrize("make", [lambda s: TokenBudgetBatcher(s, 2, 12), lambda s: FixedCountBatcher(s, 2, 3)])
def test_the_mean_over_a_step_does_not_depend_on_its_micro_batches(make):
    """One denominator per optimizer step; a mean of micro-batches' means weighs tokens by their company."""
    lengths = [9, 2, 3, 5, 2, 8, 2, 2, 7, 4]
    samples = [sample(i, length) for i, length in enumerate(lengths)]
    expected = sum((n - 1) * i / 10 for i, n in enumerate(lengths)) / sum(n - 1 for n in lengths)
    collator = DataCollatorForRollout(pad_token_id=0, num_processes=2)
    loader = DataLoader(make(samples), batch_size=100, collate_fn=collator.step)
    (step,) = loader
    assert len(step) > 1
    total = sum(
        (t["advantages"][rank] * t["completion_mask"][rank]).sum() / t["global_n_tokens"][rank]
        for t in step
        for rank in range(2)
    )
    assert float(total) == pytest.approx(expected)
    means = [(t["advantages"] * t["completion_mask"]).sum() / t["completion_mask"].sum() for t in step]
    assert float(sum(means) / len(means)) != pytest.approx(expected, rel=1e-3)


def test_row_i_is_rank_i_in_a_plan():
    micro_batches = batches_of([5, 3, 4, 4, 6, 2, 8, 8, 7, 3])
    batch, plan = rollout_step(micro_batches, PlanConstraints(dp_size=2, max_tokens=8))
    assert plan.num_micro_batches == len(micro_batches)
    for rank in range(2):
        local = plan.shard(batch, rank)
        assert local["advantages"].tolist() == pytest.approx(
            [one.advantage for rows in micro_batches for one in rows[rank]]
        )
        for k, rows in enumerate(micro_batches):
            mb = plan.micro_batches[rank][k]
            assert mb.lengths.tolist() == [len(one.input_ids) for one in rows[rank]]
            assert mb.is_filler == (not rows[rank])
    assert len(batch) == 10 and batch["response_mask"].sum() == 50 - 10


@pytest.mark.bad_input
def test_what_cannot_be_packed_is_said():
    collator = DataCollatorForRollout(pad_token_id=0, num_processes=2)
    good = [[sample(1)], [sample(2)]]
    with pytest.raises(DataError, match="2 micro-batches in one call"):
        collator([good, good])
    with pytest.raises(DataError, match="1 rows for 2 data-parallel ranks"):
        collator([good[:1]])
    with pytest.raises(DataError, match="group 7 has 4 input_ids and 3 old_log_probs"):
        collator([[[sample(7, old_log_probs=[0.0] * 3)], good[1]]])
    with pytest.raises(DataError, match="completion_mask is 0 in all"):
        collator([[[sample(7, completion_mask=[0] * 4)], []]])
    with pytest.raises(DataError, match="group 5 has no completion_mask"):
        collator([[[{"input_ids": [1], "group_id": 5}], []]])
    with pytest.raises(DataError, match="2 rows for 3 data-parallel ranks"):
        rollout_step([good], PlanConstraints(dp_size=3, max_tokens=8))
    with pytest.raises(PlanError):
        rollout_step([good], PlanConstraints(dp_size=2, max_tokens=3))
