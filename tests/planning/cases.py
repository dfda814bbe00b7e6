"""Random planning cases, and checks of the eight invariants that share no code with the package.

A check gets a case and a view: `view[rank][k]` with lists, so that a test can break it on purpose.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from roll_batching.errors import PlanError
from roll_batching.planning import LinearQuadraticCost, Plan, PlanConstraints, plan_step
from roll_batching.planning.registry import ALGORITHMS


@dataclass(frozen=True)
class Case:
    lengths: list[int]
    constraints: PlanConstraints
    cost: LinearQuadraticCost
    group_ids: list[int] | None
    home_rank: list[int] | None

    def plan(self) -> Plan:
        return plan_step(
            self.lengths,
            self.constraints,
            cost=self.cost,
            group_ids=self.group_ids,
            home_rank=self.home_rank,
        )


@dataclass
class View:
    """Contents of a plan as plain lists."""

    micro_batches: list[list[dict[str, Any]]]
    dropped: dict[int, str]
    group_size: int | None
    num_micro_batches: int


def view_of(plan: Plan) -> View:
    return View(
        micro_batches=[
            [
                {
                    "samples": mb.samples.tolist(),
                    "lengths": mb.lengths.tolist(),
                    "slots": mb.slots.tolist(),
                    "tokens": mb.tokens,
                    "rows": mb.rows,
                    "padded_length": mb.padded_length,
                    "is_filler": mb.is_filler,
                }
                for mb in rank
            ]
            for rank in plan.micro_batches
        ],
        dropped={record.index: record.reason for record in plan.dropped},
        group_size=plan.group_size,
        num_micro_batches=plan.num_micro_batches,
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    mode = draw(st.sampled_from(["packed", "packed", "dynamic", "padded"]))
    dp_size = draw(st.sampled_from([1, 2, 3, 4, 8]))
    pp_size = draw(st.sampled_from([1, 1, 2, 4]))
    vpp_size = draw(st.sampled_from([1, 2])) if pp_size > 1 else 1
    group_size: int | str | None = None
    if vpp_size > 1:
        group_size = draw(st.sampled_from([None, "auto", pp_size, pp_size + 1]))
    cap = draw(st.integers(32, 400))
    longest = draw(st.sampled_from([cap // 8, cap // 2, cap, cap + cap // 4]))
    lengths = draw(st.lists(st.integers(1, max(longest, 1)), min_size=1, max_size=40))
    oversize = draw(st.sampled_from(["error", "alone", "truncate", "drop"]))  # slice: test_slices.py
    algorithm = draw(st.sampled_from(ALGORITHMS[mode].names))
    more: dict[str, Any] = {}
    if mode == "padded":
        more["rows"] = draw(st.sampled_from([None, 1, 2, 4]))
        more["padded_length"] = draw(st.sampled_from([None, None, max(lengths), max(1, max(lengths) // 2)]))
        if more["rows"] is not None and draw(st.booleans()):
            cap = 0
    if mode != "packed":
        more["sequence_length_round"] = draw(st.sampled_from([1, 2, 8]))
    else:
        more["sequence_multiple"] = draw(st.sampled_from([None, None, 3, "2*cp*tp"]))
        more["pack_shapes"] = draw(st.sampled_from([None, None, 1, 2, 7]))
    constraints = PlanConstraints(
        dp_size=dp_size,
        max_tokens=cap or None,
        mode=mode,
        algorithm=algorithm,
        tp_size=draw(st.sampled_from([1, 2])),
        cp_size=draw(st.sampled_from([1, 1, 2])),
        sequence_parallel=draw(st.booleans()),
        pp_size=pp_size,
        vpp_size=vpp_size,
        ep_size=draw(st.sampled_from([1, 1, *(ep for ep in (2, 4, 8) if dp_size % ep == 0)])),
        fully_sharded=draw(st.integers(0, 7)) == 0,
        group_size=group_size,
        pack_multiple=draw(st.sampled_from([1, 1, 2])),
        min_num_micro_batches=draw(st.sampled_from([1, 1, 3])),
        shared_shapes=algorithm not in ("prefer_closest", "prefer_first") and draw(st.booleans()),
        oversize=oversize,
        objective=draw(st.sampled_from(["auto", "rank_total", "lockstep", "pipeline"])),
        seed=draw(st.integers(0, 3)),
        **more,
    )
    group_ids = None
    if draw(st.integers(0, 3)) == 0:
        group_ids = [i // 2 for i in range(len(lengths))]
    home_rank = None
    if draw(st.integers(0, 2)) == 0:
        homes = draw(st.lists(st.integers(0, dp_size - 1), min_size=len(lengths), max_size=len(lengths)))
        home_rank = homes if group_ids is None else [homes[group] for group in group_ids]
    cost = LinearQuadraticCost(linear=draw(st.sampled_from([0, 1, 100])), quadratic=1, fixed=5000)
    return Case(lengths, constraints, cost, group_ids, home_rank)


def groups_of(case: Case) -> list[list[int]]:
    if case.group_ids is None:
        return [[i] for i in range(len(case.lengths))]
    groups: dict[int, list[int]] = {}
    for i, group in enumerate(case.group_ids):
        groups.setdefault(group, []).append(i)
    return list(groups.values())


def up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def alignments(c: PlanConstraints) -> tuple[int, int]:
    """Alignment (per sequence, per pack) by the rules of the documentation."""
    layout = 2 * c.cp_size if c.cp_size > 1 else 1
    asked = c.sequence_multiple
    sequence = math.lcm(layout, 2 * c.cp_size * c.tp_size if asked == "2*cp*tp" else asked or 1)
    pack = math.lcm(layout, c.cp_size * c.pack_multiple * (c.tp_size if c.sequence_parallel else 1))
    if c.pack_shapes is not None:  # of the multiples next to a share of the cap, that which holds more
        assert c.max_tokens is not None
        unit = math.lcm(sequence, pack)
        below = max(c.max_tokens // c.pack_shapes // unit * unit, unit)
        held = [min(c.max_tokens // step, c.pack_shapes) * step for step in (below, below + unit)]
        pack = below if held[0] >= held[1] else below + unit
    return sequence, pack


def check_1_every_sample_once(case: Case, view: View) -> None:
    placed = [i for rank in view.micro_batches for mb in rank for i in mb["samples"]]
    assert sorted(placed + list(view.dropped)) == list(range(len(case.lengths)))
    assert all(view.dropped.values())
    if case.home_rank is not None:
        for rank, micro_batches in enumerate(view.micro_batches):
            assert all(case.home_rank[i] == rank for mb in micro_batches for i in mb["samples"])


def check_2_equal_counts_and_fillers(case: Case, view: View) -> None:
    assert len(view.micro_batches) == case.constraints.dp_size
    assert {len(rank) for rank in view.micro_batches} == {view.num_micro_batches}
    for rank in view.micro_batches:
        for mb in rank:
            assert mb["tokens"] >= 1
            assert mb["is_filler"] == (not mb["samples"])


def check_3_interleaving_rule(case: Case, view: View) -> None:
    c = case.constraints
    count = view.num_micro_batches
    assert count >= c.min_num_micro_batches
    if c.vpp_size == 1:
        assert view.group_size is None
        return
    group = view.group_size
    assert group is not None and c.pp_size <= group <= count
    assert count % group == 0 or count % group >= c.pp_size
    if c.group_size is None:
        assert count % c.pp_size == 0 and group == c.pp_size


def check_4_cap_and_alignment(case: Case, view: View) -> None:
    c = case.constraints
    sequence, pack = alignments(c)
    row = math.lcm(c.sequence_length_round, sequence, pack)
    units = {i: unit for unit, members in enumerate(groups_of(case)) for i in members}
    exempt = set()
    if c.oversize == "alone":
        for k in range(view.num_micro_batches):
            if any(
                mb["samples"] and len({units[i] for i in mb["samples"]}) == 1
                for mb in (rank[k] for rank in view.micro_batches)
            ):
                exempt.add(k)
    for micro_batches in view.micro_batches:
        for k, mb in enumerate(micro_batches):
            alone = len({units[i] for i in mb["samples"]}) == 1 or (c.shared_shapes and k in exempt)
            if c.max_tokens is not None and not (c.oversize == "alone" and alone):
                assert mb["tokens"] <= c.max_tokens
            assert mb["tokens"] % pack == 0
            if c.pack_shapes is not None and not (c.oversize == "alone" and alone):
                assert mb["tokens"] // pack <= c.pack_shapes
            assert mb["tokens"] == mb["rows"] * mb["padded_length"]
            assert sum(mb["slots"]) <= mb["tokens"]
            for i, used, slot in zip(mb["samples"], mb["lengths"], mb["slots"], strict=True):
                assert 1 <= used <= case.lengths[i]
                assert used == case.lengths[i] or c.oversize == "truncate"
                assert used <= slot and slot % sequence == 0
                if c.mode == "packed":
                    assert slot == up(used, sequence)
                else:
                    assert slot == mb["padded_length"]
            if c.mode == "packed":
                assert mb["rows"] == 1
                if mb["samples"] and not c.shared_shapes:
                    assert mb["tokens"] == up(sum(mb["slots"]), pack)
            else:
                assert mb["padded_length"] % row == 0
                if mb["samples"] and c.rows is not None and c.oversize != "alone":
                    assert len(mb["samples"]) <= c.rows


def check_5_groups_stay_together(case: Case, view: View) -> None:
    where = {}
    for rank, micro_batches in enumerate(view.micro_batches):
        for k, mb in enumerate(micro_batches):
            where.update({i: (rank, k) for i in mb["samples"]})
    for members in groups_of(case):
        assert len({where.get(i) for i in members}) == 1


def plain_first_fit_decreasing(sizes: list[int], cap: int) -> list[list[int]]:
    bins: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        for b, free in enumerate(room):
            if sizes[i] <= free:
                bins[b].append(i)
                room[b] -= sizes[i]
                break
        else:
            bins.append([i])
            room.append(max(cap - sizes[i], 0) if sizes[i] <= cap else 0)
    return bins


def units_by_rank(case: Case, view: View) -> list[tuple[list[list[int]], int]]:
    """(placed units, ranks that share them): all units, or those of each home rank."""
    dropped = set(view.dropped)
    units = [members for members in groups_of(case) if not dropped & set(members)]
    if case.home_rank is None:
        return [(units, case.constraints.dp_size)]
    homes = case.home_rank
    return [([u for u in units if homes[u[0]] == r], 1) for r in range(case.constraints.dp_size)]


def first_fit_count(case: Case, view: View) -> int:
    sequence, pack = alignments(case.constraints)
    cap = case.constraints.max_tokens or 0
    used = {
        i: n for rank in view.micro_batches for mb in rank for i, n in zip(mb["samples"], mb["lengths"], strict=True)
    }
    worst = 1
    for units, ranks in units_by_rank(case, view):
        sizes = [sum(up(used[i], sequence) for i in unit) for unit in units]
        worst = max(worst, -(-len(plain_first_fit_decreasing(sizes, cap // pack * pack)) // ranks))
    return worst


def check_6_no_more_than_first_fit_decreasing(case: Case, view: View) -> None:
    c = case.constraints
    if c.algorithm != "load_balance" or c.pp_size > 1:
        return
    assert view.num_micro_batches <= max(first_fit_count(case, view), c.min_num_micro_batches)


def pack_costs(case: Case, view: View) -> np.ndarray:
    return np.array(
        [
            [sum(case.cost.sequence(n) for n in mb["lengths"]) for mb in micro_batches]
            for micro_batches in view.micro_batches
        ]
    )


def costs_of_units(case: Case, units: list[list[int]], used: dict[int, int]) -> list[int]:
    return [sum(case.cost.sequence(used[i]) for i in unit) for unit in units]


def check_7_balance(case: Case, view: View) -> None:
    """Never worse than packs of first-fit-decreasing sorted by cost; indices in one order on all ranks."""
    c = case.constraints
    if c.algorithm != "load_balance":
        return
    table = pack_costs(case, view)
    mean = int(table.sum()) // c.dp_size
    tops = table.max(axis=0)
    if c.pp_size == 1:
        assert np.all(np.diff(tops) <= 0)
    if case.home_rank is not None or first_fit_count(case, view) > view.num_micro_batches:
        return
    sequence, pack = alignments(c)
    used = {
        i: n for rank in view.micro_batches for mb in rank for i, n in zip(mb["samples"], mb["lengths"], strict=True)
    }
    ((units, _),) = units_by_rank(case, view)
    sizes = [sum(up(used[i], sequence) for i in unit) for unit in units]
    bins = plain_first_fit_decreasing(sizes, (c.max_tokens or 0) // pack * pack)
    unit_costs = costs_of_units(case, units, used)
    costs = [sum(unit_costs[u] for u in members) for members in bins]
    costs = sorted(costs + [0] * (view.num_micro_batches * c.dp_size - len(costs)), reverse=True)
    columns = [costs[k * c.dp_size : (k + 1) * c.dp_size] for k in range(view.num_micro_batches)]
    totals = [0] * c.dp_size
    for column in sorted(columns, key=lambda column: column[-1] - column[0]):
        for cost, rank in zip(column, sorted(range(c.dp_size), key=totals.__getitem__), strict=True):
            totals[rank] += cost
    lockstep = sum(column[0] for column in columns)
    above = sum(max(0, total - mean) for total in totals)
    largest = table.sum(axis=1).max()
    if c.objective == "rank_total":
        assert largest - mean <= above
    elif c.pp_size == 1 and c.lockstep_ranks == 1:
        alone = replace(c, objective="rank_total")
        costs_alone = pack_costs(case, view_of(replace(case, constraints=alone).plan()))
        assert largest <= max(mean + mean // 2000, costs_alone.sum(axis=1).max(), max(unit_costs))
    elif c.pp_size == 1:
        blocks = table.reshape(-1, c.lockstep_ranks, table.shape[1]).max(axis=1)
        assert blocks.sum(axis=1).max() <= lockstep
    elif c.objective == "lockstep":
        assert tops.sum() <= lockstep


def check_8_integer_and_repeatable(case: Case, plan: Plan, again: Plan) -> None:
    assert plan.costs.dtype == np.int64
    assert int(plan.costs.sum()) < 2**53
    assert plan.fingerprint == again.fingerprint


CHECKS = (
    check_1_every_sample_once,
    check_2_equal_counts_and_fillers,
    check_3_interleaving_rule,
    check_4_cap_and_alignment,
    check_5_groups_stay_together,
    check_6_no_more_than_first_fit_decreasing,
    check_7_balance,
)


def plan_or_none(case: Case) -> Plan | None:
    """The plan, or None if an oversize unit raises an error or all samples are dropped."""
    try:
        return case.plan()
    except PlanError as error:
        named = any(
            word in str(error) for word in ("exceeds", "leaves no sample", "below the alignment", "padded_length=")
        )
        assert named, error
        return None
