"""The exchanges of a `Team`: the same error, sums and records on all ranks."""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.distributed as dist

from tests.support.ranks import run_ranks

MANY = 70
"""More numbers than travel with an agreement."""


def _team() -> Any:
    """Four ranks, two replicas of two."""
    from roll_batching.distributed import host_group
    from roll_batching.distributed.team import Team

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    peers = [dist.new_group([place, place + 2]) for place in range(2)]
    return Team.of(host_group(), peers[rank % 2], rank // 2)


def agreements(_: None) -> dict[str, Any]:
    from roll_batching.errors import RankError

    team, rank = _team(), dist.get_rank()
    found: dict[str, Any] = {}

    def attempt(name: str, differs: Any = None, part: Any = None, fails: tuple[int, ...] = (), count: int = 3) -> None:
        try:
            with team.agree("step") as facts:
                facts.equal("the plan", 7 if differs is None else differs, "Plan alike")
                facts.equal_in_replica("the batch", team.replica_index if part is None else part)
                facts.count(torch.arange(count, dtype=torch.float64) + team.replica_index - 0.5)
                if rank in fails:
                    raise ValueError(f"of rank {rank}")
        except RankError as error:
            found[name] = str(error)
        else:
            found[name] = facts.total.tolist()

    attempt("fine")
    attempt("many", count=MANY)
    attempt("one fails", fails=(3,))
    attempt("two fail", fails=(0, 3))
    attempt("plans differ", differs=int(rank == 2))
    attempt("plans of replicas differ", differs=team.replica_index)
    attempt("batches differ", part=int(rank == 1))
    attempt("fine again")
    return found


def test_agreements() -> None:
    first, *others = run_ranks(4, "tests.distributed.test_team:agreements")
    assert all(other == first for other in others)
    assert first["fine"] == first["fine again"] == [0.0, 2.0, 4.0]
    assert first["many"] == [2.0 * i for i in range(MANY)]
    place = r" \(\S+test_team\.py:\d+\)"
    assert re.fullmatch(f"step: rank 3: ValueError: of rank 3{place}", first["one fails"])
    both = f"step: rank 0: ValueError: of rank 0{place}; rank 3: ValueError: of rank 3{place}"
    assert re.fullmatch(both, first["two fail"])
    assert "the plan: 0 on ranks 0, 1, 3, 1 on rank 2. Plan alike" in first["plans differ"]
    assert "the plan: 0 on ranks 0, 1, 1 on ranks 2, 3" in first["plans of replicas differ"]
    assert "the batch: 0 on rank 0, 1 on rank 1" in first["batches differ"]


def records(_: None) -> tuple[list[Any], list[Any], str, int]:
    """(short records, long ones, the error of two ranks, collectives of a second long exchange)."""
    from roll_batching.errors import RankError

    team, rank = _team(), dist.get_rank()

    def merge(parts: Any) -> list[Any]:
        return [item for part in parts for item in part]

    short = team.join("words", lambda: [rank], merge)
    long = team.join("words", lambda: ["x" * 3000 * rank], merge)
    calls: list[str] = []
    gather = dist.all_gather

    def counted(*args: Any, **options: Any) -> Any:
        calls.append("gather")
        return gather(*args, **options)

    dist.all_gather = counted
    assert team.join("words", lambda: ["y" * 3000 * rank], merge)[1] == ["y" * 6000, "y" * 9000]

    def fail() -> Any:
        if rank in (1, 2):
            raise ValueError(f"of rank {rank}")
        return [rank]

    try:
        team.join("words", fail, merge)
    except RankError as error:
        return short, long, str(error), len(calls)
    raise AssertionError("nothing was raised")


def test_records() -> None:
    for short, long, error, calls in run_ranks(4, "tests.distributed.test_team:records"):
        assert short == [[0, 1], [2, 3]]
        assert [[len(word) for word in words] for words in long] == [[0, 3000], [6000, 9000]]
        place = r" \(\S+test_team\.py:\d+\)"
        both = f"words: rank 1: ValueError: of rank 1{place}; rank 2: ValueError: of rank 2{place}"
        assert re.fullmatch(both, error)
        assert calls == 4  # two exchanges of two legs


def test_alone() -> None:
    from roll_batching.distributed.team import Team

    team = Team.of(None, None, 0)
    with team.agree("step") as facts:
        facts.count(torch.tensor([2.5], dtype=torch.float64))
    assert facts.total.tolist() == [2.5]
    assert team.join("words", lambda: 3, sum) == [3]


def calls_of_a_step(megatron: dict[str, Any]) -> tuple[list[str], float]:
    """On host groups during one optimizer step, in order, with the schedule's place among them."""
    from roll_batching.losses import SFTLoss
    from roll_batching.samples import distribute, gather_lengths
    from roll_batching.strategy import MegatronTrainStrategy
    from tests.support.models import fill, random_batch, worker_config

    strategy = MegatronTrainStrategy(worker_config("packed", 64, megatron=megatron))
    strategy.initialize()
    place = strategy.layout
    fill(strategy.chunks, 61, place.tp_rank, place.tp_size)
    whole = random_batch(3, 9, 40)
    local = whole.select(torch.arange(place.dp_rank, len(whole), place.dp_size))
    plan = strategy.plan(gather_lengths(local))
    placed = distribute(local, plan)
    names = {place.host_group: "all", place.team.replica_group: "replica", place.team.peer_group: "peers"}
    calls: list[str] = []
    for name in [
        name for name in dir(dist) if name.startswith(("all_", "reduce", "broad", "gather", "scatter", "barr"))
    ]:
        setattr(dist, name, _counted(getattr(dist, name), names, calls))
    run = strategy._run

    def between(*args: Any, **options: Any) -> Any:
        calls.append("schedule")
        return run(*args, **options)

    strategy._run = between  # type: ignore[method-assign]
    loss = strategy.train_step(placed, plan, SFTLoss()).loss
    return calls, loss


def _counted(function: Any, names: dict[Any, str], calls: list[str]) -> Any:
    def call(*args: Any, **options: Any) -> Any:
        group = options.get("group") or next((x for x in args if isinstance(x, dist.ProcessGroup)), dist.group.WORLD)
        if group in names:
            calls.append(f"{function.__name__} in {names[group]}")
        return function(*args, **options)

    return call


def test_a_step_exchanges_twice() -> None:
    before = ["all_reduce in replica", "all_gather in peers"]
    after = ["all_gather in replica", "all_gather in peers"]
    both = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    for layout, kept in (({"tensor_model_parallel_size": 2}, (0, 1)), (both, (0,)), ({}, (1,))):
        everyone = run_ranks(4, "tests.distributed.test_team:calls_of_a_step", layout)
        wanted = [[legs[leg] for leg in kept] for legs in (before, after)]
        for calls, loss in everyone:
            assert calls == [*wanted[0], "schedule", *wanted[1]]
            assert loss == everyone[0][1]
