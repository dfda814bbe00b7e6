"""The stream as datasets: the same for every number of workers, resumed exactly, redistributed, errors by policy."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice

import numpy as np
import pytest
from torch.utils.data import DataLoader

from roll_batching.errors import DataError
from roll_batching.jobs.streams.load_balanced import LoadBalancedDataset, ShardedIterableDataset
from roll_batching.jobs.streams.pool_batcher import PoolBatcher

pytestmark = [
    pytest.mark.streams,
    pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:'set_vital' is deprecated"),
]
torchdata = pytest.importorskip("torchdata.stateful_dataloader", reason="pip install torchdata")


def as_it_is(step):
    return step


class Texts:
    """Samples of many lengths; sample i begins with i. Some cannot be read; reads are counted."""

    def __init__(self, count=101, seed=0, broken=()):
        drawn = np.random.default_rng(seed).lognormal(3.0, 0.9, count)
        self.lengths = np.clip(drawn, 1, 200).astype(np.int64)
        self.broken, self.reads = set(broken), Counter()

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        self.reads[index] += 1
        if index in self.broken:
            raise KeyError("disk")
        return {"input_ids": [index] * int(self.lengths[index])}


def made(texts=None, **options):
    texts = texts or Texts()
    settings = {"max_tokens_for_batch": 400, "pool_size": 8, "accumulate_steps": 2, "lengths": texts.lengths}
    return LoadBalancedDataset(texts, **settings | options)


def loader(dataset, workers, kind=DataLoader):
    return kind(dataset, batch_size=None, num_workers=workers, collate_fn=as_it_is)


def places(steps):
    return [step.indices for step in steps]


def flat(steps):
    return [index for step in steps for batch in step.indices for index in batch]


@pytest.mark.parametrize("infinite", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_the_stream_is_the_same_for_every_number_of_workers(infinite, packed):
    options = {"infinite_loop": infinite, "seq_packing_enabled": packed}
    expected = places(islice(made(**options), 40))
    for workers in (0, 1, 2, 4):
        steps = list(islice(loader(made(**options), workers), 40))
        assert places(steps) == expected, workers
        assert all([s["input_ids"][0] for s in b] == i for t in steps for b, i in zip(t, t.indices, strict=True))
        assert steps[-1].last != infinite


@pytest.mark.parametrize("size", [1, 3])
def test_each_sample_comes_once_per_epoch(size):
    seen = Counter()
    for rank in range(size):
        steps = list(made(infinite_loop=False, dp_rank=rank, dp_world_size=size))
        seen.update(flat(steps))
        assert [step.last for step in steps] == [False] * (len(steps) - 1) + [True]
    assert seen == Counter(range(101))


class Pairs(Texts):
    """Samples of two sequences: sample i's both begin with i, the second has half the tokens of the first."""

    def __init__(self, **options):
        super().__init__(**options)
        self.lengths = np.stack([self.lengths, (self.lengths + 1) // 2], 1)

    def __getitem__(self, index):
        self.reads[index] += 1
        return [{"input_ids": [index] * length} for length in self.lengths[index].tolist()]


@pytest.mark.parametrize("packed", [True, False])
def test_sequences_of_a_sample_stay_together_under_the_cap(packed):
    pairs = Pairs()
    steps = list(made(pairs, seq_packing_enabled=packed, infinite_loop=False, sequence_multiple=4))
    batches = [batch for step in steps for batch in step]
    for batch in batches:
        slots = [-(-len(one["input_ids"]) // 4) * 4 for pair in batch for one in pair]
        assert (sum(slots) if packed else len(slots) * max(slots)) <= 400
        assert all(len(pair) == 2 for pair in batch)
    assert max(map(len, batches)) > 3, "and it is used"
    assert sorted(index for step in steps for batch in step.indices for index in batch) == list(range(101))
    two = loader(made(pairs, seq_packing_enabled=packed, infinite_loop=False, sequence_multiple=4), 2)
    assert places(two) == places(steps)


@pytest.mark.bad_input
def test_what_is_wrong_with_several_sequences_is_said():
    with pytest.raises(
        DataError, match=r"Sample 0 has 150 and 60 tokens, which stay together \(300 in rows of one length\)"
    ):
        made(Pairs(count=1), lengths=np.array([[150, 60]]), max_tokens_for_batch=299)
    with pytest.raises(DataError, match=r"Sample 0 has 150 and 60 tokens, which stay together, more than max_tokens"):
        made(Pairs(count=1), lengths=np.array([[150, 60]]), max_tokens_for_batch=209, seq_packing_enabled=True)
    with pytest.raises(DataError, match="Sample 0: it is several sequences, which stay together: give their lengths"):
        made(Pairs(), lengths=None)
    pairs = Pairs(count=1)
    with pytest.raises(DataError, match=r"has .* tokens, and 3 and 3 were measured"):
        next(iter(made(pairs, lengths=np.array([[3, 3]]))))


def test_a_dataset_has_about_so_many_steps():
    for packed, within in ((True, 1.1), (False, 1.6)):
        dataset = made(Texts(2000), infinite_loop=False, seq_packing_enabled=packed, pool_size=64)
        assert 1 <= len(list(dataset)) / len(dataset) <= within


def test_set_epoch_and_skip_batches():
    dataset = made()
    first, again = places(islice(dataset, 12)), places(islice(dataset, 12))
    assert first == again, "an iteration begins with the epoch"
    dataset.skip_batches(5)
    reads = dataset.base_dataset.reads.copy()
    assert places(islice(dataset, 7)) == first[5:]
    assert dataset.base_dataset.reads.total() - reads.total() == sum(len(b) for t in first[5:] for b in t)
    dataset.set_epoch(1)
    assert places(islice(dataset, 12)) != first


# ---- going on


@pytest.mark.parametrize("saved_by, loaded_by", [(0, 0), (2, 3), (3, 0), (0, 4)])
def test_a_step_says_where_to_go_on_for_any_number_of_workers(saved_by, loaded_by):
    expected = places(islice(made(), 60))
    steps = list(islice(loader(made(), saved_by), 23))
    texts = Texts()
    again = made(texts)
    again.load_state_dict(json.loads(json.dumps(steps[-1].state)))
    assert not texts.reads, "nothing is read to go there"
    assert places(islice(loader(again, loaded_by), 37)) == expected[23:]


@pytest.mark.parametrize("workers", [0, 2, 4])
@pytest.mark.parametrize("taken", [0, 7])
def test_with_torchdatas_loader(workers, taken):
    expected = places(islice(made(), 30))
    one = loader(made(), workers, torchdata.StatefulDataLoader)
    steps = iter(one)
    assert places(islice(steps, taken)) == expected[:taken]
    state = one.state_dict()
    two = loader(made(), workers, torchdata.StatefulDataLoader)
    two.load_state_dict(state)
    assert places(islice(two, 30 - taken)) == expected[taken:]


def test_cap_pool_and_strategy_may_change():
    dataset = made()
    seen = flat(islice(dataset, 3))
    for changes in ({"pool_size": 3}, {"pool_size": 30}, {"max_tokens_for_batch": 900}, {"seq_packing_enabled": True}):
        again = made(infinite_loop=False, **changes)
        again.load_state_dict(dataset.state_dict())
        assert Counter(seen + flat(again)) == Counter(range(101)), changes


@pytest.mark.bad_input
def test_what_is_of_something_else_is_refused_with_the_difference():
    state = made(dp_world_size=2).state_dict()
    others = {
        "of another seed: seed 0, here 1": made(dp_world_size=2, seed=1),
        "of another number of samples: samples 101, here 100": made(Texts(100), dp_world_size=2),
        "of a dataset of other lengths": made(Texts(seed=1), dp_world_size=2),
        "of rank 0, this is rank 1": made(dp_world_size=2, dp_rank=1),
        "of 2 data-parallel ranks, and there are 3: .* pass repartition: true": made(dp_world_size=3),
    }
    for words, dataset in others.items():
        with pytest.raises(DataError, match=words):
            dataset.load_state_dict(state)
    with pytest.raises(DataError, match=r"needs the positions of all 2 saved ranks; given are those of \[0\]"):
        made(dp_world_size=3).load_state_dict(state, repartition=True)
    with pytest.raises(DataError, match="lacks pool"):
        made().load_state_dict({k: v for k, v in made().state_dict().items() if k != "pool"})
    with pytest.raises(DataError, match="impossible: epoch=0, cursor=999"):
        made().load_state_dict(made().state_dict() | {"cursor": 999})


@pytest.mark.parametrize("sizes", [(2, 3), (4, 1), (3, 5, 2)])
@pytest.mark.parametrize("infinite", [True, False])
def test_dealt_anew_every_sample_once(sizes, infinite):
    """Ranks of uneven progress (some an epoch ahead), dealt to another number of them, perhaps twice."""
    seen, states, length = Counter(), None, Texts().lengths
    for size in sizes:
        ranks = []
        for rank in range(size):
            former = PoolBatcher(length, max_tokens=400, pool_size=8, rank=rank, size=size, infinite=infinite)
            if states is not None:
                former.load_state_dict(json.loads(json.dumps(states)), repartition=True)
            for _ in range(3 + 4 * rank if size != sizes[-1] else 0):
                seen.update(former.next_batch().tolist())
            ranks.append(former)
        states = [former.state_dict() for former in ranks]
    epochs = 1 + max(state["epoch"] for state in states)
    for former in ranks:
        while former.epoch < epochs and not former.ended:
            before = former.epoch
            seen.update(former.next_batch().tolist())
            assert former.epoch - before <= 1
    drawn = seen + Counter(p for former in ranks for p in former.state_dict()["pool"])
    if infinite:  # some have drawn from the epoch after as well
        ahead = Counter(
            p for former in ranks for p in former._order[: former._cursor].tolist() if former.epoch == epochs
        )
        drawn -= ahead
    assert drawn == Counter({index: epochs for index in range(101)})


# ---- samples that cannot be read


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_that_raises_is_named(workers):
    dataset = made(Texts(broken={40}), infinite_loop=False)
    with pytest.raises(DataError, match=r"Sample 40 cannot be read \(KeyError: 'disk'\)"):
        list(loader(dataset, workers))


def test_after_an_error_the_same_step_can_be_asked_for_again():
    texts = Texts(broken={40})
    expected, got = places(made(infinite_loop=False)), []
    steps = iter(made(texts, infinite_loop=False))
    with pytest.raises(DataError):
        while True:
            got.append(next(steps))
    texts.broken.clear()
    assert places([*got, *steps]) == expected


def test_or_it_is_left_out_and_counted(caplog):
    dataset = made(Texts(broken={7, 40}), infinite_loop=False, on_error="skip")
    steps = list(dataset)
    assert Counter(flat(steps)) == Counter(set(range(101)) - {7, 40}) and dataset.skipped == 2
    assert sorted(i for step in steps for i in step.skipped) == [7, 40]
    assert "Sample 40 cannot be read (KeyError: 'disk'). It is left out." in caplog.text


@pytest.mark.bad_input
def test_what_a_dataset_refuses(tmp_path):
    with pytest.raises(DataError, match=r"Sample 3 has 2 tokens, and \d+ were measured"):
        texts = Texts()
        dataset = made(texts, infinite_loop=False)
        texts.lengths = texts.lengths.copy()
        texts.lengths[3] = 2
        list(dataset)
    with pytest.raises(DataError, match=r"more than max_tokens=20, and \d+ more samples"):
        made(max_tokens_for_batch=20)
    with pytest.raises(DataError, match="no length under 'tokens' .keys input_ids.: name the key"):
        made(lengths=None, length_key="tokens")
    with pytest.raises(DataError, match="Rank 1 of 2 has no samples: the dataset holds 1"):
        made(Texts(1), dp_rank=1, dp_world_size=2)
    assert list(made(Texts(1), dp_rank=1, dp_world_size=2, infinite_loop=False)) == []


# ---- lengths, shards


def test_lengths_are_measured_once(tmp_path, caplog):
    texts, cache = Texts(), tmp_path / "lengths.npz"
    assert places(islice(made(texts, lengths=None, length_cache=cache), 9)) == places(islice(made(), 9))
    again = Texts()
    made(again, lengths=None, length_cache=cache)
    assert again.reads.total() <= 16
    other = Texts(seed=1)
    assert np.array_equal(made(other, lengths=None, length_cache=cache)._lengths, other.lengths)
    assert "lengths are measured again" in caplog.text


def test_a_shard_is_a_ranks_part_of_the_data():
    shards = [ShardedIterableDataset(Texts(), rank, 2, seed=4) for rank in range(2)]
    orders = [[sample["input_ids"][0] for sample in shard] for shard in shards]
    assert sorted(orders[0]) == list(range(0, 101, 2)) and sorted(orders[1]) == list(range(1, 101, 2))
    assert [len(shard) for shard in shards] == [51, 50]
    for workers in (1, 3):
        assert [s["input_ids"][0] for s in loader(shards[0], workers)] == orders[0]
    shards[0].set_epoch(1)
    assert [sample["input_ids"][0] for sample in shards[0]] != orders[0]
    over = LoadBalancedDataset(shards[1], max_tokens_for_batch=400, infinite_loop=False)
    assert sorted(flat(over)) == list(range(1, 101, 2))
