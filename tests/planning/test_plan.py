"""Plans, constraints, oversize policies, home ranks and groups."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields

import numpy as np
import pytest

from roll_batching.errors import PlanError
from roll_batching.planning import LinearQuadraticCost, Plan, PlanConstraints, batch_balance, plan_step

pytestmark = pytest.mark.planning

LENGTHS = [700, 30, 512, 90, 1000, 45, 333, 8, 220, 610]


def constraints(**more) -> PlanConstraints:
    return PlanConstraints(**{"dp_size": 2, "max_tokens": 1024, **more})


def test_a_plan_survives_json_and_notices_changes():
    plan = plan_step(LENGTHS, constraints(cp_size=2), ids=np.arange(10) + 100, location=[0, 1] * 5)
    values = json.loads(json.dumps(plan.to_dict()))
    again = Plan.from_dict(values)
    assert again == plan and again.report == plan.report
    assert again.location.tolist() == [0, 1] * 5
    values["ids"][0] = 7
    with pytest.raises(PlanError, match="changed after it was made"):
        Plan.from_dict(values)
    values = plan.to_dict()
    values["samples"][0] = values["samples"][1]
    with pytest.raises(PlanError, match="placed"):
        Plan.from_dict(values)


@pytest.mark.parametrize("way", ["planned", "from_dict", "from_bins"])
def test_no_array_of_a_plan_can_be_written_to(way):
    given = {"lengths": np.array(LENGTHS), "ids": np.arange(10) + 100, "location": np.array([0, 1] * 5)}
    plan = plan_step(constraints=constraints(), **given)
    if way == "from_dict":
        plan = Plan.from_dict(plan.to_dict())
    if way == "from_bins":
        bins = [[mb.samples.tolist() for mb in rank] for rank in plan.micro_batches]
        plan = Plan.from_bins(bins, given["lengths"], constraints(), ids=given["ids"], location=given["location"])
    holders = {"": plan} | {f"micro-batch {r}.{k}.": mb for r in range(2) for k, mb in enumerate(plan.micro_batches[r])}
    arrays = {
        prefix + field.name: value
        for prefix, holder in holders.items()
        for field in fields(holder)
        if isinstance(value := getattr(holder, field.name), np.ndarray)
    }
    assert {"lengths", "rows", "costs", "location", "micro-batch 0.0.lengths"} <= arrays.keys()
    for name, array in arrays.items():
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
            pytest.fail(f"{name} was written to")
    before = plan.fingerprint
    for array in given.values():  # the caller's own arrays are the caller's, and the plan does not follow them
        array[0] += 1
    del plan.__dict__["fingerprint"]
    assert plan.fingerprint == before


def test_location_is_carried_and_not_part_of_the_fingerprint():
    first = plan_step(LENGTHS, constraints(), location=[0] * 10)
    assert first.fingerprint == plan_step(LENGTHS, constraints(), location=[1] * 10).fingerprint
    assert first.fingerprint != plan_step(LENGTHS, constraints(), ids=np.arange(10) + 1).fingerprint


def test_rank_samples_and_shard_follow_the_micro_batches():
    plan = plan_step(LENGTHS, constraints(), ids=np.arange(10) * 3)

    @dataclass
    class Batch:
        ids: list[int]

        def select_ids(self, ids):
            return Batch(ids.tolist())

    for rank in range(2):
        expected = np.concatenate([mb.samples for mb in plan.micro_batches[rank]])
        assert plan.rank_samples(rank).tolist() == expected.tolist()
        assert plan.shard(Batch([]), rank).ids == (expected * 3).tolist()


def test_fewer_samples_than_ranks_get_fillers():
    plan = plan_step([5], constraints(dp_size=4, cp_size=2, tp_size=2, sequence_parallel=True))
    assert plan.report.fillers == 3
    fillers = [mb for rank in plan.micro_batches for mb in rank if mb.is_filler]
    assert {mb.tokens for mb in fillers} == {4}
    assert all(len(mb.samples) == len(mb.slots) == 0 for mb in fillers)


@pytest.mark.parametrize("mode", ["packed", "dynamic", "padded"])
def test_oversize_policies(mode):
    lengths = [10, 40, 200, 30]
    base = {"dp_size": 1, "max_tokens": 100, "mode": mode}
    with pytest.raises(PlanError, match=r"sample 2 \(id 12\) of length 200 exceeds max_tokens=100"):
        plan_step(lengths, PlanConstraints(**base), ids=[10, 11, 12, 13])
    alone = plan_step(lengths, PlanConstraints(**base, oversize="alone"))
    (big,) = [mb for mb in alone.micro_batches[0] if mb.tokens > 100]
    assert big.samples.tolist() == [2] and big.tokens == 200
    cut = plan_step(lengths, PlanConstraints(**base, oversize="truncate"))
    assert cut.report.truncated == 1 and cut.used.tolist() == [10, 40, 100, 30]
    dropped = plan_step(lengths, PlanConstraints(**base, oversize="drop"))
    assert [(d.index, d.length) for d in dropped.dropped] == [(2, 200)] and "exceeds" in dropped.dropped[0].reason
    with pytest.raises(PlanError, match="leaves no sample"):
        plan_step([200], PlanConstraints(**base, oversize="drop"))


def test_a_group_above_the_cap_follows_the_policy_as_one():
    lengths, groups = [60, 60, 20], [1, 1, 2]
    with pytest.raises(PlanError, match="the group of 2 samples with 120 tokens"):
        plan_step(lengths, constraints(max_tokens=100), group_ids=groups)
    cut = plan_step(lengths, constraints(max_tokens=100, oversize="truncate"), group_ids=groups)
    assert cut.used.tolist() == [50, 50, 20]
    gone = plan_step(lengths, constraints(max_tokens=100, oversize="drop"), group_ids=groups)
    assert [d.index for d in gone.dropped] == [0, 1]


def test_home_ranks_keep_samples_where_they_are():
    home = batch_balance(LENGTHS, 2)
    plan = plan_step(LENGTHS, constraints(), home_rank=home)
    for rank in range(2):
        assert set(home[plan.rank_samples(rank)].tolist()) == {rank}
    with pytest.raises(PlanError, match="one home rank"):
        plan_step([5, 6], constraints(), group_ids=[0, 0], home_rank=[0, 1])
    with pytest.raises(PlanError, match="not a data-parallel rank"):
        plan_step([5, 6], constraints(), home_rank=[0, 2])


def test_from_bins_checks_what_others_formed():
    good = Plan.from_bins([[[0, 1], [2]], [[3], []]], [5, 6, 7, 8], constraints(max_tokens=12))
    assert good.report.fillers == 1 and good.micro_batches[0][0].samples.tolist() == [0, 1]
    lengths = [5, 6, 7, 8]
    cases = [
        ([[[0, 1], [2]], [[3]]], "different numbers of micro-batches"),
        ([[[0, 1]], [[3]]], "is placed 0 times"),
        ([[[0, 1, 2]], [[3, 0]]], "placed 2 times"),
        ([[[0, 1, 2]], [[3]]], "takes 18 tokens, max_tokens=12"),
        ([[[0, 9]], [[3]]], "samples are 0 to 3"),
        ([[[0]]], "has 1 ranks"),
    ]
    for bins, message in cases:
        with pytest.raises(PlanError, match=message):
            Plan.from_bins(bins, lengths, constraints(max_tokens=12))
    with pytest.raises(PlanError, match="not in the micro-batch of its group"):
        Plan.from_bins([[[0, 1]], [[2, 3]]], [1] * 4, constraints(), group_ids=[0, 1, 1, 0])
    with pytest.raises(PlanError, match="the next legal number is 2"):
        Plan.from_bins([[[0, 1]], [[2, 3]]], [1] * 4, constraints(pp_size=2, vpp_size=2))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0; it must be an integer, at least 1"),
        ({"max_tokens": -5}, "max_tokens is -5"),
        ({"max_tokens": None}, "needs max_tokens"),
        ({"mode": "paked"}, "mode is 'paked'; it must be one of packed, dynamic, padded"),
        ({"algorithm": "roll"}, "does not exist in mode 'packed'"),
        ({"vpp_size": 2}, "needs pp_size of at least 2"),
        ({"group_size": 4}, "only with vpp_size > 1"),
        ({"pp_size": 4, "vpp_size": 2, "group_size": 3}, "below pp_size=4"),
        ({"rows": 2}, 'mode "padded" only'),
        ({"sequence_length_round": 8}, "is not read in mode 'packed'"),
        ({"sequence_multiple": "2*cp"}, "2\\*cp\\*tp"),
        ({"max_tokens": 3, "cp_size": 4}, "below the alignment"),
        ({"oversize": "skip"}, "oversize is 'skip'"),
        ({"objective": "speed"}, "objective is 'speed'"),
        ({"seed": -1}, "seed is -1"),
        ({"dp_size": 2.0}, "dp_size is 2.0"),
    ],
)
def test_constraints_that_cannot_be_met_are_refused_by_name(more, message):
    with pytest.raises(PlanError, match=message):
        constraints(**more)


@pytest.mark.parametrize(
    ("lengths", "more", "message"),
    [
        ([], {}, "at least one sample"),
        ([5, 0], {}, "sample 1 .* has length 0"),
        ([5.5], {}, "must be integers"),
        ([[1, 2]], {}, "one-dimensional"),
        ([5, 6], {"ids": [3, 3]}, "id 3 is given 2 times"),
        ([5, 6], {"ids": [3]}, "one value per sample"),
    ],
)
def test_lengths_that_cannot_be_planned_are_refused_by_name(lengths, more, message):
    with pytest.raises(PlanError, match=message):
        plan_step(lengths, constraints(), **more)


def test_alignment_of_the_layout():
    c = constraints(cp_size=2, tp_size=4, sequence_parallel=True, pack_multiple=16)
    assert (c.sequence_alignment, c.pack_alignment) == (4, 2 * 16 * 4)
    plain = constraints(cp_size=1, tp_size=4)
    assert (plain.sequence_alignment, plain.pack_alignment) == (1, 1)


def test_padded_mode_with_and_without_a_fixed_length():
    own = plan_step([3, 9, 4, 5], PlanConstraints(dp_size=2, mode="padded", rows=2))
    assert [[(mb.rows, mb.padded_length) for mb in rank] for rank in own.micro_batches] == [[(2, 9)], [(2, 5)]]
    fixed = plan_step([3, 9, 4, 5], PlanConstraints(dp_size=2, mode="padded", rows=1, padded_length=12))
    assert fixed.report.computed_tokens == 48 and fixed.num_micro_batches == 2


def test_shared_shapes_of_packs():
    plan = plan_step(LENGTHS, constraints(shared_shapes=True))
    tokens = plan.tokens.reshape(2, -1)
    assert np.all(tokens == tokens[0])


@pytest.mark.parametrize(
    "algorithm, expected",
    [("prefer_closest", [[0, 3, 4, 6], [1, 5], [2]]), ("prefer_first", [[0, 3, 4, 6], [1, 2], [5]])],
)
def test_prefer_closest_and_prefer_first(algorithm, expected):
    """The oldest item opens; the item that keeps max * rows smallest joins; closest: among equals by length."""
    constraints = PlanConstraints(dp_size=1, mode="dynamic", algorithm=algorithm, max_tokens=18)
    bins = [mb.samples.tolist() for mb in plan_step([4, 9, 5, 4, 2, 8, 1], constraints).micro_batches[0]]
    assert sorted(map(sorted, bins)) == expected


@pytest.mark.parametrize("algorithm", ["prefer_closest", "prefer_first"])
def test_rectangles_of_the_oldest_by_the_book(algorithm):
    """Compared with a simple implementation, also for units of several rows."""
    for seed in range(20):
        rng = np.random.default_rng(seed)
        lengths = rng.integers(1, 60, 40)
        groups = np.repeat(np.arange(40), rng.integers(1, 4, 40))[:40] if seed % 2 else np.arange(40)
        constraints = PlanConstraints(dp_size=1, mode="dynamic", algorithm=algorithm, max_tokens=240)
        found = [mb.samples.tolist() for mb in plan_step(lengths, constraints, group_ids=groups).micro_batches[0]]
        units = [np.flatnonzero(groups == group).tolist() for group in dict.fromkeys(groups.tolist())]
        expected = []
        while units:
            members = units.pop(0)
            while True:
                longest = lengths[members].max()

                def size(unit, members=members, longest=longest, lengths=lengths):
                    return max(longest, lengths[unit].max()) * (len(members) + len(unit))

                legal = [unit for unit in units if size(unit) <= 240]
                if not legal:
                    break
                equals = [unit for unit in legal if size(unit) == min(map(size, legal))]
                if algorithm == "prefer_closest":
                    equals.sort(key=lambda unit, longest=longest: abs(lengths[unit].max() - longest))
                units.remove(equals[0])
                members = members + equals[0]
            expected.append(sorted(members))
        assert sorted(map(sorted, found)) == sorted(expected), seed


def test_objectives_do_what_they_say():
    rng = np.random.default_rng(3)
    lengths = np.clip(rng.lognormal(6.5, 1.0, 96), 1, 4096).astype(int)
    cost = LinearQuadraticCost(100, 1)

    def report(objective):
        return plan_step(lengths, PlanConstraints(dp_size=4, max_tokens=4096, objective=objective), cost=cost).report

    assert report("rank_total").imbalance <= report("lockstep").imbalance
    assert report("lockstep").lockstep_imbalance <= report("rank_total").lockstep_imbalance


def test_a_giant_among_equals_fills_its_own_column():
    """Lockstep: packs beside a giant cost no time, so full packs are placed there."""
    lengths = [16384] + [300] * 1023

    def lockstep(**more):
        constraints = PlanConstraints(dp_size=8, max_tokens=16384, **more)
        return plan_step(lengths, constraints).report.lockstep_imbalance

    assert lockstep(objective="lockstep") <= lockstep(algorithm="first_fit_decreasing")


@pytest.mark.parametrize("giants", [1, 3, 8])
def test_the_rank_of_a_giant_gets_less_of_the_rest(giants):
    """Otherwise its rank total would exceed the others by the cost of the giant above a pack: 26% here."""
    lengths = [8000] * giants + [300] * 4800
    plan = plan_step(lengths, PlanConstraints(dp_size=128, max_tokens=8192), cost=LinearQuadraticCost(24576, 1))
    assert plan.num_micro_batches == 2
    assert plan.report.imbalance < 0.02


@pytest.mark.bad_input
def test_lengths_beyond_64_bits_are_refused_not_wrapped():
    with pytest.raises(PlanError, match="lengths must fit into 64 bits with a sign, got 9223372036854775808"):
        plan_step(np.array([5, 2**63], dtype=np.uint64), PlanConstraints(dp_size=1, max_tokens=16))
