"""Where samples travel: inside each replica's own group, through no group at all, and without needless work."""

from __future__ import annotations

from collections import Counter

import pytest
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from roll_batching.errors import DataError
from roll_batching.samples import LengthTable, collect, distribute, gather_lengths
from tests.samples.batches import assert_same, make_batch
from tests.samples.test_all_to_all import computed, join, plan_for, split
from tests.support.ranks import run_ranks


def in_replicas(payload: None) -> list[int]:
    """Four ranks, two replicas side by side: first by groups of our own, then by Megatron's."""
    rank, _ = join()
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group, place = groups[rank % 2], rank // 2
    local = make_batch(*split(2, 5)[place])
    plan = plan_for(gather_lengths(local, group), 2)
    mine = distribute(local, plan, group)
    assert_same(collect(computed(mine), plan, group), computed(local))

    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    local = make_batch(*split(2, 6)[parallel_state.get_data_parallel_rank()])
    table = gather_lengths(local)
    plan = plan_for(table, 2)
    assert_same(collect(computed(distribute(local, plan)), plan), computed(local))
    return table.ids.tolist()


def test_every_replica_exchanges_in_its_own_group():
    pytest.importorskip("megatron.core")
    results = run_ranks(4, "tests.samples.test_all_to_all_groups:in_replicas")
    assert results == [sum((ids for ids, _ in split(2, 6)), [])] * 4


def test_one_process_needs_no_group():
    local = make_batch([5, 3, 9, 1], [7, 2, 5, 4])
    assert LengthTable.of(local).ids.tolist() == gather_lengths(local).ids.tolist() == [5, 3, 9, 1]
    for located in (True, False):
        plan = plan_for(gather_lengths(local), 1, located, max_tokens=9)
        mine = distribute(local, plan)
        assert_same(mine, plan.shard(local, 0))
        assert_same(collect(computed(mine), plan, like=local), computed(local))
        assert_same(collect(computed(mine), plan), computed(local))
    with pytest.raises(DataError, match=r"lacks them|does not hold|No rank holds"):
        distribute(local.select([0, 1]), plan)


class Operators(TorchDispatchMode):
    """Counts the tensor operators that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_results_of_whole_samples_are_not_stretched():
    """A field is placed once per field on its way home; only where a sample was cut is it stretched before."""
    local = make_batch([5, 3, 9], [7, 2, 5])
    plan = plan_for(gather_lengths(local), 1)
    whole = computed(distribute(local, plan))
    short = computed(make_batch(whole.ids.tolist(), (whole.lengths - 1).tolist()))
    placed = {}
    for name, results in (("whole", whole), ("short", short)):
        with Operators() as operators:
            collect(results, plan)
        placed[name] = operators.seen["index_copy_"]
    assert placed == {"whole": 6, "short": 8}, "five fields; one after its counts, two per token"
