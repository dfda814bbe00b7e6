"""Micro-batches from a pool: every sample once, the cap, cosmos-rl's strategies, resuming; and their plan."""

from __future__ import annotations

import datetime
import json
from collections import Counter

import numpy as np
import pytest
import torch
import torch.distributed as dist

from roll_batching.errors import DataError, RankError
from roll_batching.jobs.streams import LoadBalancedDataset, PoolBatcher
from roll_batching.planning import Plan, PlanConstraints
from roll_batching.samples import SampleBatch, distribute, gather_bins, gather_lengths
from tests.samples.batches import assert_same, make_batch
from tests.support.ranks import run_ranks

STRATEGIES = pytest.mark.parametrize("strategy", ["prefer_closest", "prefer_first", "packed"])


def lengths_of(count, seed=0, longest=200):
    return np.clip(np.random.default_rng(seed).lognormal(3.5, 0.9, count), 1, longest).astype(int).tolist()


def batcher_of(lengths, **options):
    return PoolBatcher(np.array(lengths), **{"max_tokens": 400, "pool_size": 8, **options})


def batches_of(batcher, most=10**9):
    """Tuples of indices, until the data ends or there are `most`."""
    batches = []
    while len(batches) < most and (batch := tuple(batcher.next_batch().tolist())):
        batches.append(batch)
    return batches


@STRATEGIES
@pytest.mark.parametrize("size", [1, 3])
def test_each_sample_comes_once_per_epoch_on_its_rank(strategy, size):
    lengths, seen = lengths_of(101), Counter()
    for rank in range(size):
        batcher = batcher_of(lengths, strategy=strategy, rank=rank, size=size, infinite=False)
        indices = [index for batch in batches_of(batcher) for index in batch]
        assert batcher.ended and all(index % size == rank for index in indices)
        seen.update(indices)
    assert seen == Counter(range(101))


@STRATEGIES
def test_the_cap_holds_on_aligned_tokens(strategy):
    lengths = lengths_of(300)
    batches = batches_of(batcher_of(lengths, strategy=strategy, sequence_multiple=8), 60)
    assert len(batches) == 60
    for batch in batches:
        slots = [-(-lengths[i] // 8) * 8 for i in batch]
        assert (sum(slots) if strategy == "packed" else len(slots) * max(slots)) <= 400


def test_an_infinite_stream_drops_nothing_between_epochs():
    batcher = batcher_of(lengths_of(23))
    seen = Counter(index for batch in batches_of(batcher, 40) for index in batch)
    waiting = Counter(batcher.state_dict()["pool"])
    drawn = batcher.epoch * 23 + batcher.state_dict()["cursor"]
    assert sum(seen.values()) + sum(waiting.values()) == drawn
    total = seen + waiting
    assert max(total.values()) - min(total[i] for i in range(23)) <= 1


def rows_by_the_book(slots, cap, strategy):
    """Spelled out: try every candidate, keep the best."""
    chosen, rest = [0], list(range(1, len(slots)))
    while True:
        longest = max(slots[i] for i in chosen)
        legal = [i for i in rest if max(longest, slots[i]) * (len(chosen) + 1) <= cap]
        if not legal:
            return chosen
        smallest = min(max(longest, slots[i]) for i in legal)
        equals = [i for i in legal if max(longest, slots[i]) == smallest]
        best = equals[0]
        if strategy == "prefer_closest":
            best = min(equals, key=lambda i: abs(slots[i] - longest))
        chosen.append(best)
        rest.remove(best)


@pytest.mark.parametrize("strategy", ["prefer_closest", "prefer_first"])
def test_a_rectangle_grows_by_the_sample_that_keeps_it_smallest(strategy):
    for seed in range(30):
        lengths, options = lengths_of(16, seed), {"pool_size": 16, "infinite": False, "seed": seed}
        pool = batcher_of(lengths, max_tokens=10**9, strategy="packed", **options).next_batch().tolist()
        chosen = rows_by_the_book([lengths[i] for i in pool], 400, strategy)
        batch = batcher_of(lengths, strategy=strategy, **options).next_batch().tolist()
        assert batch == [pool[i] for i in chosen]


@pytest.mark.parametrize(
    "strategy, expected",
    [
        # The pool is 4 9 5 4 2 8 1, the cap 18. The oldest (4) begins.
        ("prefer_closest", [(0, 3, 4, 6), (1, 5), (2,)]),
        ("prefer_first", [(0, 3, 4, 6), (1, 2), (5,)]),
        ("packed", [(0, 1, 2), (3, 4, 5, 6)]),
    ],
)
def test_the_strategies_on_paper(strategy, expected, monkeypatch):
    monkeypatch.setattr(PoolBatcher, "_order_of", lambda self, epoch: np.arange(7))
    batcher = batcher_of([4, 9, 5, 4, 2, 8, 1], max_tokens=18, strategy=strategy, infinite=False)
    assert batches_of(batcher) == expected


@STRATEGIES
def test_a_resumed_stream_continues_exactly(strategy):
    lengths = lengths_of(50)
    options = {"strategy": strategy, "rank": 1, "size": 2, "seed": 4}
    batcher = batcher_of(lengths, **options)
    expected = batches_of(batcher_of(lengths, **options), 60)
    for done in range(1, 50):
        assert tuple(batcher.next_batch().tolist()) == expected[done - 1]
        state = json.loads(json.dumps(batcher.state_dict()))
        assert len(state["pool"]) <= 8
        again = batcher_of(lengths, **options)
        again.load_state_dict(state)
        assert batches_of(again, 10) == expected[done : done + 10]
    assert batcher.epoch >= 1


def test_ranks_seeds_and_epochs_have_different_orders():
    lengths = lengths_of(40)
    orders = {
        tuple(batcher_of(lengths, rank=rank, size=2, seed=seed)._order_of(epoch).tolist())
        for rank in range(2)
        for seed in range(2)
        for epoch in range(2)
    }
    assert len(orders) == 8 and all({i % 2 for i in order} in ({0}, {1}) for order in orders)


class Flaky(list):
    """A dataset that cannot read one of its samples the first time."""

    broken = -1

    def __getitem__(self, index):
        if index == self.broken:
            self.broken = -1
            raise KeyError("disk")
        return super().__getitem__(index)


@pytest.mark.parametrize("broken", range(30))
def test_an_error_surfaces_and_no_sample_is_lost(broken):
    samples = [[0] * n for n in lengths_of(30)]

    def steps_of(dataset):
        return iter(
            LoadBalancedDataset(
                dataset,
                lengths=np.array(lengths_of(30)),
                pool_size=4,
                max_tokens_for_batch=400,
                accumulate_steps=3,
                infinite_loop=False,
            )
        )

    flaky = Flaky(samples)
    flaky.broken = broken
    stream, indices, errors = steps_of(flaky), [], 0
    while True:
        try:
            indices.append(next(stream).indices)
        except DataError:
            errors += 1
        except StopIteration:
            break
    assert errors == 1
    assert indices == [step.indices for step in steps_of(samples)]


@pytest.mark.bad_input
def test_bad_arguments_and_states_are_named():
    with pytest.raises(DataError, match=r"Sample 1 has 401 tokens, more than max_tokens=400"):
        batcher_of([3, 401])
    with pytest.raises(DataError, match=r"Sample 0 has 399 tokens \(512 aligned to 512\)"):
        batcher_of([399], sequence_multiple=512)
    with pytest.raises(DataError, match="Rank 0 of 1 has no samples: the dataset holds 0"):
        batcher_of([0])
    with pytest.raises(DataError, match="pool_size is at least 1; got 0"):
        batcher_of([1], pool_size=0)
    with pytest.raises(DataError, match="strategy is one of prefer_closest, prefer_first, packed; got 'best'"):
        batcher_of([1], strategy="best")
    with pytest.raises(DataError, match="Rank 1 of 2 has no samples: the dataset holds 1"):
        batcher_of([1], rank=1, size=2)
    with pytest.raises(DataError, match="rank=2, size=2"):
        batcher_of([1, 2, 3], rank=2, size=2)
    state = batcher_of([1, 2, 3, 4]).state_dict()
    with pytest.raises(DataError, match="of 1 data-parallel ranks, and there are 2"):
        batcher_of([1, 2, 3, 4], size=2).load_state_dict(state)
    with pytest.raises(DataError, match="lacks pool"):
        batcher_of([1, 2, 3, 4]).load_state_dict({k: v for k, v in state.items() if k != "pool"})
    with pytest.raises(DataError, match="impossible"):
        batcher_of([1, 2, 3, 4]).load_state_dict(state | {"pool": [9]})


# ---- from a stream to a plan


def streamed_step(payload: None) -> tuple[int, str]:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    rank, world = dist.get_rank(), dist.get_world_size()
    lengths = lengths_of(60)
    # Rank 1 forms fewer micro-batches: the plan gives it a filler.
    step = batches_of(batcher_of(lengths, rank=rank, size=world, strategy="packed"), 3 - rank)
    indices = [index for batch in step for index in batch]
    local = make_batch(indices, [lengths[i] for i in indices])
    bins = gather_bins(local, [len(batch) for batch in step])
    table = gather_lengths(local)
    plan = Plan.from_bins(
        bins,
        table.lengths,
        PlanConstraints(dp_size=world, max_tokens=400),
        ids=table.ids,
        location=table.location,
    )
    assert_same(distribute(local, plan), local)
    tokens = [mb.tokens for mb in plan.micro_batches[rank] if not mb.is_filler]
    assert tokens == [sum(lengths[i] for i in batch) for batch in step]
    with pytest.raises(RankError, match=r"rank 1: DataError: Micro-batches of \[1\] samples"):
        gather_bins(local, [len(local)] if rank == 0 else [1])
    return sum(mb.is_filler for rank in plan.micro_batches for mb in rank), plan.fingerprint


def test_batches_of_a_stream_become_a_plan():
    results = run_ranks(2, "tests.jobs.streams.test_pool_batcher:streamed_step")
    assert results[0] == results[1] and results[0][0] == 1


def test_a_formed_batch_becomes_tensors():
    documents = [list(range(n)) for n in (3, 5, 2)]
    step = next(iter(LoadBalancedDataset(documents, max_tokens_for_batch=100, infinite_loop=False)))
    batch = SampleBatch.from_lists({"input_ids": step[0]}, {"input_ids": "token"}, ids=step.indices[0])
    assert torch.equal(batch.lengths, torch.tensor([len(documents[i]) for i in step.indices[0]]))
