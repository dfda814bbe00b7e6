from __future__ import annotations

import datetime
import json
from collections import Counter
from itertools import islice

import numpy as np
import pytest
import torch
import torch.distributed as dist

from roll_batching.errors import DataError, RankError
from roll_batching.jobs.streams import LengthAwareStream
from roll_batching.planning import Plan, PlanConstraints
from roll_batching.samples import SampleBatch, distribute, gather_bins, gather_lengths
from tests.samples.batches import assert_same, make_batch
from tests.support.ranks import run_ranks

STRATEGIES = pytest.mark.parametrize("strategy", ["prefer_closest", "prefer_first", "packed"])


def lengths_of(count, seed=0, longest=200):
    return np.clip(np.random.default_rng(seed).lognormal(3.5, 0.9, count), 1, longest).astype(int).tolist()


def stream_of(lengths, **options):
    return LengthAwareStream(lengths, int, **{"max_tokens": 400, "pool_size": 8, **options})


def indices(steps):
    return [index for step in steps for batch in step for index in batch.indices]


@STRATEGIES
@pytest.mark.parametrize("size", [1, 3])
def test_each_sample_comes_once_per_epoch_on_its_rank(strategy, size):
    lengths = lengths_of(101)
    seen = Counter()
    for rank in range(size):
        stream = stream_of(lengths, strategy=strategy, rank=rank, size=size, infinite=False, batches_per_step=2)
        steps = list(stream)
        assert all(len(step) == 2 for step in steps[:-1]) and 1 <= len(steps[-1]) <= 2
        seen.update(indices(steps))
    assert seen == Counter(range(101))


@STRATEGIES
def test_the_cap_holds_on_aligned_tokens(strategy):
    lengths = lengths_of(300)
    for step in islice(stream_of(lengths, strategy=strategy, sequence_multiple=8), 60):
        for batch in step:
            slots = [-(-lengths[i] // 8) * 8 for i in batch.indices]
            packed = strategy == "packed"
            assert batch.tokens == (sum(slots) if packed else len(slots) * max(slots)) <= 400
            assert batch.lengths == tuple(lengths[i] for i in batch.indices) == batch.samples


def test_an_infinite_stream_drops_nothing_between_epochs():
    lengths = lengths_of(23)
    stream = stream_of(lengths)
    steps = list(islice(stream, 40))
    seen = Counter(indices(steps))
    waiting = Counter(stream.state_dict()["pool"])
    drawn = stream.epoch * 23 + stream.state_dict()["cursor"]
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
def test_a_rectangle_grows_by_what_keeps_it_smallest(strategy):
    for seed in range(30):
        lengths = lengths_of(16, seed)
        stream = stream_of(lengths, pool_size=16, infinite=False, seed=seed, strategy=strategy)
        order = stream_of(lengths, pool_size=16, infinite=False, seed=seed, max_tokens=10**9, strategy="packed")
        pool = next(order)[0].indices
        chosen = rows_by_the_book([lengths[i] for i in pool], 400, strategy)
        assert next(stream)[0].indices == tuple(pool[i] for i in chosen)


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
    monkeypatch.setattr(LengthAwareStream, "_order_of", lambda self, epoch: np.arange(7))
    stream = stream_of([4, 9, 5, 4, 2, 8, 1], max_tokens=18, strategy=strategy, infinite=False)
    assert [batch.indices for step in stream for batch in step] == expected


@STRATEGIES
def test_a_resumed_stream_reads_only_its_pool_again(strategy):
    lengths = lengths_of(50)
    options = {"strategy": strategy, "rank": 1, "size": 2, "seed": 4, "batches_per_step": 2}
    stream = stream_of(lengths, **options)
    for _ in range(25):
        next(stream)
        state = json.loads(json.dumps(stream.state_dict()))
        reads = []
        again = LengthAwareStream(
            lengths, lambda n, reads=reads: reads.append(n) or n, max_tokens=400, pool_size=8, **options
        )
        again.load_state_dict(state)
        assert len(reads) == len(state["pool"]) <= 8
        ahead = stream_of(lengths, **options)
        ahead.load_state_dict(state)
        assert list(islice(again, 4)) == list(islice(ahead, 4))
    expected = list(islice(stream, 5))
    again = stream_of(lengths, **options)
    again.load_state_dict(state)
    assert list(islice(again, 5)) == expected
    assert stream.epoch >= 1


def test_ranks_and_epochs_have_their_own_order():
    lengths = lengths_of(40)
    orders = {
        tuple(stream_of(lengths, rank=rank, size=2, seed=seed)._order_of(epoch).tolist())
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
def test_an_error_surfaces_and_nothing_is_lost(broken):
    lengths = lengths_of(30)
    options = {"pool_size": 4, "batches_per_step": 3, "infinite": False}
    dataset = Flaky(lengths)
    dataset.broken = broken
    stream = stream_of(dataset, **options)
    steps, errors = [], 0
    while True:
        try:
            steps.append(next(stream))
        except KeyError:
            errors += 1
        except StopIteration:
            break
    assert errors == 1
    assert steps == list(stream_of(lengths, **options))


@pytest.mark.bad_input
def test_what_a_stream_cannot_do_is_said():
    with pytest.raises(DataError, match=r"Sample 1 has 401 tokens, more than max_tokens=400"):
        next(stream_of([3, 401]))
    with pytest.raises(DataError, match=r"Sample 0 has 399 tokens \(512 aligned to 512\)"):
        next(stream_of([399], sequence_multiple=512))
    with pytest.raises(DataError, match="Sample 0 has no tokens"):
        next(stream_of([0]))
    with pytest.raises(DataError, match="pool_size is at least 1; got 0"):
        stream_of([1], pool_size=0)
    with pytest.raises(DataError, match="strategy is one of prefer_closest, prefer_first, packed; got 'best'"):
        stream_of([1], strategy="best")
    with pytest.raises(DataError, match="Rank 1 of 2 has no samples: the dataset holds 1"):
        stream_of([1], rank=1, size=2)
    with pytest.raises(DataError, match="rank=2, size=2"):
        stream_of([1, 2, 3], rank=2, size=2)
    state = stream_of([1, 2, 3, 4]).state_dict()
    with pytest.raises(DataError, match="has size=1, this stream size=2"):
        stream_of([1, 2, 3, 4], size=2).load_state_dict(state)
    with pytest.raises(DataError, match="lacks pool"):
        stream_of([1, 2, 3, 4]).load_state_dict({k: v for k, v in state.items() if k != "pool"})
    with pytest.raises(DataError, match="impossible"):
        stream_of([1, 2, 3, 4]).load_state_dict(state | {"pool": [9]})


# ---- from a stream to a plan


def streamed_step(payload: None) -> tuple[int, str]:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    rank, world = dist.get_rank(), dist.get_world_size()
    lengths = lengths_of(60)
    # Rank 1 forms fewer micro-batches: the plan gives it a filler.
    stream = stream_of(lengths, rank=rank, size=world, batches_per_step=3 - rank, strategy="packed")
    step = next(stream)
    numbers = [index for batch in step for index in batch.indices]
    local = make_batch(numbers, [lengths[i] for i in numbers])
    bins = gather_bins(local, [len(batch.indices) for batch in step])
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
    assert tokens == [batch.tokens for batch in step]
    with pytest.raises(RankError, match=r"rank 1: DataError: Micro-batches of \[1\] samples"):
        gather_bins(local, [len(local)] if rank == 0 else [1])
    return sum(mb.is_filler for rank in plan.micro_batches for mb in rank), plan.fingerprint


def test_batches_of_a_stream_become_a_plan():
    results = run_ranks(2, "tests.jobs.streams.test_stream:streamed_step")
    assert results[0] == results[1] and results[0][0] == 1


def test_a_formed_batch_becomes_tensors():
    documents = [list(range(n)) for n in (3, 5, 2)]
    step = next(LengthAwareStream(documents, len, max_tokens=100, infinite=False))
    batch = SampleBatch.from_lists({"input_ids": step[0].samples}, {"input_ids": "token"}, ids=step[0].indices)
    assert torch.equal(batch.lengths, torch.tensor(step[0].lengths))
