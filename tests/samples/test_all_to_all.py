"""Real processes exchange real batches; every value tells where it belongs (see `batches`)."""

from __future__ import annotations

import datetime
import re
import traceback

import numpy as np
import pytest
import torch
import torch.distributed as dist

from roll_batching.errors import DataError, RankError
from roll_batching.planning import Plan, PlanConstraints, plan_step
from roll_batching.samples import (
    FieldSpec,
    LengthTable,
    SampleBatch,
    collect,
    distribute,
    gather_lengths,
    number_globally,
)
from tests.samples.batches import assert_same, make_batch
from tests.support.ranks import run_ranks


@pytest.fixture(scope="module", params=[2, 3], ids="{} ranks".format)
def world(request):
    return request.param


@pytest.fixture(scope="module")
def outcomes(world):
    """What every case returned on every rank: one launch for all of them."""
    ranks = run_ranks(world, "tests.samples.test_all_to_all:all_cases", timeout=240)
    return {case: [rank[case] for rank in ranks] for case in ranks[0]}


def returned(outcomes, case):
    """The case's result on every rank, or a failure that shows the ranks' tracebacks."""
    failures = [f"rank {rank}:\n{text}" for rank, (ok, text) in enumerate(outcomes[case]) if not ok]
    if failures:
        pytest.fail("\n".join(failures), pytrace=False)
    return [result for _, result in outcomes[case]]


def all_cases(payload: None) -> dict:
    rank, world = join()
    results = {}
    for case in (round_trips, mini_batch, cut_and_dropped, renumbered, bad_states):
        try:
            results[case.__name__] = True, case(rank, world)
        except Exception:
            results[case.__name__] = False, traceback.format_exc()
    return results


def join() -> tuple[int, int]:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    return dist.get_rank(), dist.get_world_size()


def split(world: int, seed: int, empty: int | None = None) -> list[tuple[list[int], list[int]]]:
    """Ids (not in order) and lengths of every rank; one rank may have none."""
    random = np.random.default_rng(seed)
    counts = random.integers(1, 9, world)
    if empty is not None:
        counts[empty] = 0
    ids = random.permutation(1000)[: counts.sum()]
    lengths = random.integers(1, 40, counts.sum())
    cuts = np.cumsum(counts)[:-1]
    return [(i.tolist(), n.tolist()) for i, n in zip(np.split(ids, cuts), np.split(lengths, cuts), strict=True)]


def plan_for(table: LengthTable, world: int, location: bool = True, **options) -> Plan:
    constraints = PlanConstraints(dp_size=world, **{"max_tokens": 64, **options})
    return plan_step(table.lengths, constraints, ids=table.ids, location=table.location if location else None)


def computed(batch: SampleBatch) -> SampleBatch:
    """Results with fields of their own: per token, per prediction, per sample, and rows."""
    return SampleBatch(
        batch.ids,
        batch.lengths,
        {
            "log_probs": batch["input_ids"].double() * 0.5,
            "entropy": batch["features"].float()[:, :, 0],
            "reward": batch["reward"],
            "boxes": batch["patches"] * 2,
            "count": batch["patch_count"],
            "loss": 3,
        },
        {
            "log_probs": FieldSpec("next_token", -1),
            "entropy": FieldSpec("token", -2),
            "reward": FieldSpec("sample", -3),
            "boxes": FieldSpec("rows", counts="count"),
            "count": FieldSpec("sample"),
            "loss": "static",
        },
    )


def reorder_fields(rank: int, batch: SampleBatch) -> SampleBatch:
    """`batch` with its fields in another order on odd ranks, as those of a set may be."""
    if rank % 2 == 0:
        return batch
    fields, schema = (dict(reversed(list(named.items()))) for named in (batch.fields, batch.schema))
    return SampleBatch(batch.ids, batch.lengths, fields, schema)


def round_trips(rank: int, world: int) -> list[str]:
    cases: list = [(split(world, seed), {}) for seed in range(6)]
    cases += [(split(world, 10 + rank, empty=rank), {}) for rank in range(world)]
    cases += [([([7], [3]), *[([], [])] * (world - 1)], {})]
    cases += [(split(world, 20), {"mode": "dynamic"}), (split(world, 21), {"mode": "padded", "rows": 2})]
    checked = []
    for parts, options in cases:
        everything = make_batch(sum((p[0] for p in parts), []), sum((p[1] for p in parts), []))
        local = make_batch(*parts[rank])
        table = gather_lengths(local)
        assert table.ids.tolist() == everything.ids.tolist()
        assert table.lengths.tolist() == everything.lengths.tolist()
        assert table.location.tolist() == sum(([r] * len(p[0]) for r, p in enumerate(parts)), [])
        for located in (True, False):
            plan = plan_for(table, world, located, **options)
            mine = distribute(reorder_fields(rank, local), plan)
            assert_same(mine, plan.shard(everything, rank))
            shuffled = reorder_fields(rank, computed(mine).select(torch.randperm(len(mine))))
            assert_same(collect(shuffled, plan, like=local), computed(local))
            if located:
                assert_same(collect(shuffled, plan), computed(local))
        checked.append(plan.fingerprint)
    return checked


def test_samples_travel_and_results_come_home_in_order(outcomes):
    results = returned(outcomes, "round_trips")
    assert len(results[0]) > 9 and all(r == results[0] for r in results)


def mini_batch(rank: int, world: int) -> None:
    local = make_batch(*split(world, 3)[rank])
    table = gather_lengths(local)
    chosen = np.arange(len(table))[::-2]
    plan = plan_for(table.select(chosen), world)
    everything = make_batch(table.ids.tolist(), table.lengths.tolist())
    mine = distribute(local, plan)
    assert_same(mine, plan.shard(everything, rank))
    here = set(table.ids[chosen].tolist())
    kept = [i for i, number in enumerate(local.ids.tolist()) if number in here]
    assert_same(collect(computed(mine), plan, like=local), computed(local.select(kept)))
    # Without like= the order is the plan's, which took the rollout batch backwards.
    assert_same(collect(computed(mine), plan), computed(local.select(kept[::-1])))


def test_a_mini_batch_is_taken_out_of_a_rollout_batch(outcomes):
    returned(outcomes, "mini_batch")


def cut_and_dropped(rank: int, world: int) -> int:
    local = make_batch(*split(world, 4)[rank])
    table = gather_lengths(local)
    plan = plan_for(table, world, max_tokens=30, oversize="drop")
    gone = {record.id for record in plan.dropped}
    mine = distribute(local, plan)
    assert not gone & set(mine.ids.tolist())
    home = collect(computed(mine), plan)
    assert home.ids.tolist() == local.ids.tolist() and home.lengths.tolist() == local.lengths.tolist()
    expected = computed(local)
    for name, pad in (("log_probs", -1), ("entropy", -2), ("reward", -3)):
        rows = zip(home.ids.tolist(), home.to_lists(name), expected.to_lists(name), strict=True)
        for number, got, wanted in rows:
            assert torch.equal(got, torch.full_like(got, pad) if number in gone else wanted), (name, number)
    for number, got, wanted in zip(home.ids.tolist(), home.to_lists("boxes"), expected.to_lists("boxes"), strict=True):
        assert torch.equal(got, wanted[:0] if number in gone else wanted), number

    plan = plan_for(table, world, max_tokens=30, oversize="truncate")
    mine = distribute(local, plan)
    assert mine.lengths.tolist() == plan.lengths[plan.rank_samples(rank)].tolist()  # samples travel whole
    used = torch.from_numpy(np.minimum(mine.lengths.numpy(), 30))
    position = torch.arange(mine.num_tokens) - mine.offsets[:-1].repeat_interleave(mine.lengths)
    kept = position < used.repeat_interleave(mine.lengths)
    whole = computed(mine)
    short = SampleBatch(
        mine.ids,
        used,
        {n: v[kept] if whole.schema[n].per_token else v for n, v in whole.fields.items()},
        whole.schema,
    )
    home = collect(short, plan)
    for got, wanted in zip(home.to_lists("log_probs"), expected.to_lists("log_probs"), strict=True):
        assert torch.equal(got[:30], wanted[:30]) and (got[30:] == -1).all()
    return len(gone)


def test_dropped_and_truncated_samples_read_pad_where_nothing_was_computed(outcomes):
    assert all(dropped > 0 for dropped in returned(outcomes, "cut_and_dropped"))


def renumbered(rank: int, world: int) -> list[int]:
    local = make_batch(*[([5, 1], [2, 1]), ([], []), ([5], [4])][rank])
    again = number_globally(local)
    assert torch.equal(again["input_ids"], local["input_ids"])
    return again.ids.tolist()


def test_ids_are_numbered_over_all_ranks(outcomes):
    results = returned(outcomes, "renumbered")
    assert results == [[0, 1], [], [2]][: len(results)]


# ---- bad states: the same error on every rank, before anything moves, and the ranks can go on


def _good(rank: int, world: int) -> tuple[SampleBatch, Plan]:
    local = make_batch([10 * rank + i for i in range(3)], [4, 2, 6])
    return local, plan_for(gather_lengths(local), world)


def same_id(rank, world):
    gather_lengths(make_batch([7, rank], [2, 3]))


def no_batch(rank, world):
    gather_lengths({"input_ids": 1} if rank == 1 else make_batch([rank], [3]))


def nobody_holds(rank, world):
    local, plan = _good(rank, world)
    plan = plan_step([4, 2], PlanConstraints(dp_size=world, max_tokens=64), ids=[10, 999])
    distribute(local, plan)


def held_twice(rank, world):
    local, plan = _good(rank, world)
    plan = plan_step([4, 2], PlanConstraints(dp_size=world, max_tokens=64), ids=[10, 11])
    if rank == 0:
        local = SampleBatch.concat([local, make_batch([11], [2])])
    distribute(local, plan)


def held_elsewhere(rank, world):
    local, plan = _good(rank, world)
    if rank == 0:
        local = SampleBatch.concat([local, make_batch([11], [2])])
    distribute(local, plan)


def not_here(rank, world):
    local, plan = _good(rank, world)
    distribute(local.select([0, 2]) if rank == 1 else local, plan)


def other_length(rank, world):
    local, plan = _good(rank, world)
    distribute(make_batch(local.ids.tolist(), [4, 3, 6]) if rank == 1 else local, plan)


def other_plan(rank, world):
    local, plan = _good(rank, world)
    other = plan_for(gather_lengths(local), world, max_tokens=12)
    distribute(local, other if rank == 1 else plan)


def other_location(rank, world):
    local, plan = _good(rank, world)
    other = plan_for(gather_lengths(local), world, location=False)
    assert other.fingerprint == plan.fingerprint
    distribute(local, other if rank == 1 else plan)


def other_dp_size(rank, world):
    local, _ = _good(rank, world)
    distribute(local, plan_for(gather_lengths(local), world + 1))


def missing_field(rank, world):
    local, plan = _good(rank, world)
    distribute(local.without("reward") if rank == 1 else local, plan)


def other_dtype(rank, world):
    local, plan = _good(rank, world)
    half = local.with_fields({"log_probs": local["log_probs"].half()}, {"log_probs": "next_token"})
    distribute(half if rank == 1 else local, plan)


def other_static(rank, world):
    local, plan = _good(rank, world)
    warm = local.with_fields({"temperature": 0.5 + rank}, {"temperature": "static"})
    distribute(warm, plan)


def no_results(rank, world):
    local, plan = _good(rank, world)
    mine = computed(distribute(local, plan))
    collect(mine.select([0]) if rank == 1 else mine, plan)


def results_of_others(rank, world):
    local, plan = _good(rank, world)
    distribute(local, plan)
    samples = plan.rank_samples((rank + 1) % world)
    collect(make_batch(plan.ids[samples].tolist(), plan.lengths[samples].tolist()), plan)


def too_long(rank, world):
    local, plan = _good(rank, world)
    mine = distribute(local, plan)
    lengths = mine.lengths + 1 if rank == 1 else mine.lengths
    rows = torch.zeros(int(lengths.sum()))
    collect(SampleBatch(mine.ids, lengths, {"x": rows}, {"x": "token"}), plan)


def no_home(rank, world):
    local, _ = _good(rank, world)
    plan = plan_for(gather_lengths(local), world, location=False)
    collect(distribute(local, plan), plan)


BAD = {
    same_id: r"Sample id 7 is held twice, by data-parallel ranks 0 and 1.*number_globally",
    no_batch: "rank 1: DataError: gather_lengths takes a SampleBatch as batch; got dict",
    nobody_holds: "distribute: .*No rank holds sample ids 999",
    held_twice: r"Sample id 11 is held by data-parallel ranks \[0, 1\]",
    held_elsewhere: "rank 0: DataError: This rank's batch holds .* 11, which the plan locates on rank 1",
    not_here: "rank 1: DataError: The plan locates sample ids 11 here",
    other_length: "rank 1: DataError: Sample id 11 has 3 tokens here, but the plan was made for 2",
    other_plan: "ranks differ in the plan: .* on ranks? 0.*, .* on ranks? 1",
    other_location: "ranks differ in the plan's location: .* on ranks? 0.*, None on rank 1",
    other_dp_size: "The plan is for . data-parallel ranks, the group has",
    missing_field: "ranks differ in field 'reward': sample float64.2. pad nan on rank.* 0.*, absent on rank 1",
    other_dtype: "next_token bfloat16 pad 0 on rank.* 0.*, next_token float16 pad 0 on rank 1",
    other_static: "ranks differ in field 'temperature': static 0.5 on rank 0, static 1.5 on rank 1",
    no_results: "rank 1: DataError: No results for sample ids",
    results_of_others: "Results for sample ids .*, which the plan gives to rank",
    too_long: r"rank 1: DataError: The result for sample id \d+ has \d+ rows, the sample \d+ tokens",
    no_home: "does not say where samples lie: pass like=",
}


def bad_states(rank: int, world: int) -> list[tuple[str, str]]:
    errors = []
    for state in BAD:
        try:
            state(rank, world)
            errors.append(("none", ""))
        except (RankError, DataError) as error:
            errors.append((type(error).__name__, str(error)))
        # Nothing is left half-sent: the next exchange works.
        local, plan = _good(rank, world)
        assert_same(collect(computed(distribute(local, plan)), plan), computed(local))
    return errors


@pytest.mark.bad_input
def test_a_bad_state_is_one_error_on_all_ranks(outcomes, report):
    results = returned(outcomes, "bad_states")
    assert all(errors == results[0] for errors in results)
    for (state, pattern), (kind, message) in zip(BAD.items(), results[0], strict=True):
        assert kind in ("RankError", "DataError"), state
        assert re.search(pattern, message), (state, message)
        if len(results) == 2:
            report(f"{state.__name__.replace('_', ' ')}: {kind}: {message}")
