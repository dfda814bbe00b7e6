"""`consensus` and `exchange`: one error on all ranks, within seconds, and later operations work."""

from __future__ import annotations

import datetime
import re
import time
from typing import Any

import pytest

from roll_batching.distributed import consensus, digest, exchange
from roll_batching.distributed.consensus import _format_ranks
from roll_batching.errors import DataError, RankError
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.bad_input


def outcomes(_: None) -> list[tuple[str, str]]:
    import torch.distributed as dist

    from roll_batching.distributed import host_group

    dist.init_process_group("gloo")
    rank, group = dist.get_rank(), host_group()
    seen = []
    for case in CASES:
        try:
            case(rank, group)
            seen.append(("nothing", ""))
        except (RankError, DataError) as error:
            seen.append((type(error).__name__, re.sub(r" \(\S+test_consensus\.py:\d+\)", " (place)", str(error))))
        with consensus(group, "afterwards") as facts:
            facts.equal("the case", case.__name__)
    return seen


def fails(rank: int, group: Any) -> None:
    with consensus(group, "work"):
        if rank == 1:
            raise KeyError("advantages")


def two_fail(rank: int, group: Any) -> None:
    with consensus(group, "work"):
        if rank:
            raise DataError("a hole in the mask")


def leaves(rank: int, group: Any) -> None:
    with consensus(group, "work"):
        if rank == 2:
            raise SystemExit(0)


def differs(rank: int, group: Any) -> None:
    with consensus(group, "work") as facts:
        facts.equal("the plan", f"plan {rank // 2}", "Plan again")
        facts.equal("the settings", "alike")


def lacks(rank: int, group: Any) -> None:
    with consensus(group, "work") as facts:
        if rank != 1:
            facts.equal("the plan", 7)


def exchange_fails(rank: int, group: Any) -> None:
    exchange(group, "work", lambda: 1 // (rank - 1))


def exchange_works(rank: int, group: Any) -> None:
    assert exchange(group, "work", lambda: [rank]) == [[0], [1], [2]]


CASES = {
    fails: ("RankError", "work: rank 1: KeyError: 'advantages' (place)"),
    two_fail: ("RankError", "work: ranks 1, 2: DataError: a hole in the mask"),
    leaves: (
        "RankError",
        "work: rank 2: SystemExit: code called exit(0), which would end the job as if it were done",
    ),
    differs: ("RankError", "work: ranks differ in the plan: plan 0 on ranks 0, 1, plan 1 on rank 2. Plan again"),
    lacks: ("RankError", "work: ranks differ in the plan: 7 on ranks 0, 2, absent on rank 1"),
    exchange_fails: ("RankError", "work: rank 1: ZeroDivisionError: integer division or modulo by zero (place)"),
    exchange_works: ("nothing", ""),
}


def test_all_ranks_raise_the_same_and_go_on() -> None:
    results = run_ranks(3, "tests.distributed.test_consensus:outcomes", timeout=60)
    for seen in results:
        assert dict(zip([case.__name__ for case in CASES], seen, strict=True)) == {
            case.__name__: expected for case, expected in CASES.items()
        }


def test_many_ranks_are_abbreviated_and_digests_separate_their_parts() -> None:
    assert _format_ranks([3]) == "rank 3"
    assert _format_ranks(range(8)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7"
    assert _format_ranks(range(9)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 1 more"
    assert digest("ab", "c") != digest("a", "bc") and digest("ab") == digest(b"ab")
    assert all(0 <= digest(str(number)) < 1 << 62 for number in range(100))


def test_a_single_process_raises_its_own_error() -> None:
    with pytest.raises(KeyError, match="advantages"):
        fails(1, None)
    with pytest.raises(ZeroDivisionError):
        exchange_fails(1, None)


# ---- timeouts

SECONDS = 3.0


def hang(layout: dict[str, int]) -> dict[str, float]:
    """Rank 0 joins no collective: seconds until the timeout on the other ranks, by group."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    from roll_batching.distributed import group_timeout, host_group
    from roll_batching.distributed.parallel_layout import make_layout, start_processes
    from roll_batching.planning import ParallelDims

    device = start_processes(SECONDS / 60)
    made = make_layout(ParallelDims.of_world(4, **layout), device)
    ours = {"world": dist.group.WORLD, "host": host_group(), "layout's host": made.host_group}
    found = {name: value for name, value in vars(parallel_state).items() if name.endswith("_GROUP") and value}
    groups = {**ours, **{name: group for name, group in found.items() if isinstance(group, dist.ProcessGroup)}}
    assert {"_TENSOR_MODEL_PARALLEL_GROUP", "_PIPELINE_MODEL_PARALLEL_GROUP", "_EMBEDDING_GROUP"} <= groups.keys()
    wanted = datetime.timedelta(seconds=SECONDS)
    assert {name: group_timeout(group) for name, group in groups.items()} == dict.fromkeys(groups, wanted)
    dist.barrier()
    if dist.get_rank() == 0:
        time.sleep(3 * SECONDS)
        return {}
    with_zero = {name: g for name, g in groups.items() if 0 in dist.get_process_group_ranks(g) and g.size() > 1}
    started = time.monotonic()
    waiting = {name: dist.all_reduce(torch.ones(1), group=group, async_op=True) for name, group in with_zero.items()}
    if made.pp_rank and 0 in dist.get_process_group_ranks(made.pp_group):
        waiting["a pipeline receive"] = dist.irecv(torch.ones(1), src=0, group=made.pp_group)
    seconds = {}
    for name, work in waiting.items():
        with pytest.raises(RuntimeError):
            work.wait()
        seconds[name] = time.monotonic() - started
    return seconds


@pytest.mark.parametrize(
    "layout",
    [{"tp_size": 2, "pp_size": 2}, pytest.param({"cp_size": 2, "ep_size": 2}, marks=pytest.mark.slow)],
    ids=str,
)
def test_a_timeout_ends_a_hang_on_every_group(layout: dict[str, int], report: Any) -> None:
    _, *others = run_ranks(4, "tests.distributed.test_consensus:hang", layout, timeout=60)
    for seconds in others:
        assert {"world", "host"} <= seconds.keys()
        assert all(SECONDS * 0.9 < value < SECONDS + 5 for value in seconds.values()), seconds
    longest = max(value for seconds in others for value in seconds.values())
    report(f"{layout}: {len(set().union(*others))} kinds of waiting gave up within {longest:.1f} s")
