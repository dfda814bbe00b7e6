"""Samples that begin alike: found exactly, planned so that each position is computed or stands before its sample."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll_batching.errors import PlanError
from roll_batching.planning import Plan, PlanConstraints, SharedPrefixes, plan_step
from roll_batching.planning.prefixes import SHORTEST_PREFIX
from roll_batching.planning.report import step_time


def grow(random: np.random.Generator, prefix: np.ndarray, depth: int) -> list[np.ndarray]:
    """Samples of a random tree; some end where others go on, some are equal."""
    here = np.concatenate([prefix, random.integers(0, 5, random.integers(0, 60))])
    if depth == 0 or random.random() < 0.2:
        return [here] * int(random.integers(1, 3)) if len(here) else []
    return [row for _ in range(random.integers(1, 6)) for row in grow(random, here, depth - 1)]


def samples_of(seed: int, trees: int = 6) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    rows = [row for _ in range(trees) for row in grow(random, np.zeros(0, np.int64), int(random.integers(0, 4)))]
    rows = rows or [np.array([1, 2, 3])]
    return [rows[i] for i in random.permutation(len(rows))]


def agreement(first: np.ndarray, second: np.ndarray) -> int:
    """Positions whose state and label two samples have in common."""
    width = min(len(first), len(second))
    differing = np.flatnonzero(first[:width] != second[:width])
    agree = int(differing[0]) if len(differing) else width
    return agree - 1 if agree - 1 >= SHORTEST_PREFIX else 0


def prefixes_of(rows: list[np.ndarray]) -> SharedPrefixes:
    return SharedPrefixes.of(np.concatenate(rows), [len(row) for row in rows])


@given(st.integers(0, 10_000))
@settings(max_examples=60, deadline=None)
def test_prefixes_are_those_of_the_tokens_also_of_a_part_of_the_samples(seed: int) -> None:
    rows = samples_of(seed)
    prefixes = prefixes_of(rows)
    for before, after, shared in zip(prefixes.order, prefixes.order[1:], prefixes.shared[1:], strict=False):
        assert shared == agreement(rows[before], rows[after])
    # No sample has more in common with another one than with a neighbour.
    for i, row in enumerate(rows):
        place = int(prefixes.places[i])
        nearest = max([int(x) for x in prefixes.shared[place : place + 2] if x or place] or [0])
        if place == 0:
            nearest = int(prefixes.shared[1]) if len(rows) > 1 else 0
        assert max([agreement(row, other) for j, other in enumerate(rows) if j != i], default=0) == nearest
    index = np.random.default_rng(seed).permutation(len(rows))[: max(1, len(rows) // 2)]
    part, again = prefixes.select(index), prefixes_of([rows[i] for i in index])
    np.testing.assert_array_equal(part.shared, again.shared)


LAYOUTS: list[dict[str, Any]] = [
    {},
    {"dp_size": 4},
    {"dp_size": 2, "cp_size": 2},
    {"dp_size": 2, "tp_size": 2, "sequence_parallel": True},
    {"dp_size": 2, "pp_size": 2},
    {"dp_size": 2, "pp_size": 2, "vpp_size": 2},
    {"dp_size": 3, "objective": "lockstep"},
    {"dp_size": 2, "algorithm": "first_fit_decreasing"},
    {"dp_size": 2, "oversize": "alone"},
    {"dp_size": 2, "oversize": "drop"},
    {"dp_size": 2, "oversize": "truncate"},
]


def check(plan: Plan, rows: list[np.ndarray], without: Plan | None) -> None:
    """The invariants of prefixes, from the token ids: what a sample takes, the sample before it has."""
    assert Plan.from_dict(plan.to_dict()) == plan
    placed = sorted(int(i) for rank in plan.micro_batches for mb in rank for i in mb.samples)
    assert placed + sorted(record.index for record in plan.dropped) == sorted(range(len(rows))) or plan.dropped
    alignment = plan.constraints.sequence_alignment
    for rank in plan.micro_batches:
        for mb in rank:
            have: np.ndarray = np.zeros(0, np.int64)
            for number, (sample, used, shared, slot) in enumerate(
                zip(mb.samples, mb.lengths, mb.shared, mb.slots, strict=True)
            ):
                row = rows[sample][:used]
                assert shared < len(row) and (number or not shared)
                np.testing.assert_array_equal(have[:shared], row[:shared])
                # The label of the last shared position too, if the sample before has one there.
                assert not shared or have[shared] == row[shared]
                assert slot == -(-(len(row) - shared) // alignment) * alignment
                have = row
            assert mb.slots.sum() <= mb.tokens
            if plan.constraints.oversize != "alone":
                assert mb.tokens <= plan.constraints.max_tokens
    own = sum(int((mb.lengths - mb.shared).sum()) for rank in plan.micro_batches for mb in rank)
    assert plan.report.padding_tokens == plan.report.computed_tokens - own
    assert 0 <= plan.report.padding_share < 1 and 0 < plan.report.fill
    if without is not None:
        assert plan.report.computed_tokens <= without.report.computed_tokens


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@given(seed=st.integers(0, 10_000), cap=st.sampled_from([128, 320, 1024]))
@settings(max_examples=12, deadline=None)
def test_random_trees_keep_the_invariants(layout: dict[str, Any], seed: int, cap: int) -> None:
    rows = samples_of(seed)
    lengths = [len(row) for row in rows]
    cap = cap if "oversize" in layout else max(cap, -(-max(lengths) // 8) * 8)
    constraints = PlanConstraints(**{"dp_size": 1, "max_tokens": cap, **layout})
    prefixes = prefixes_of(rows)
    try:
        without = plan_step(lengths, constraints)
    except PlanError as error:
        assert "leaves no sample" in str(error)
        return
    plan = plan_step(lengths, constraints, prefixes=prefixes)
    check(plan, rows, without if constraints.pp_size == 1 else None)
    if constraints.algorithm == "load_balance" and "oversize" not in layout:
        fixed = 24576 * 512
        assert step_time(plan, fixed) <= step_time(without, fixed)
    assert plan_step(lengths, constraints, prefixes=prefixes) == plan


@given(seed=st.integers(0, 10_000))
@settings(max_examples=20, deadline=None)
def test_groups_and_home_ranks_keep_their_meaning(seed: int) -> None:
    rows = samples_of(seed)
    lengths = [len(row) for row in rows]
    random = np.random.default_rng(seed)
    constraints = PlanConstraints(dp_size=2, max_tokens=1 << 14)
    groups = random.integers(0, 4, len(rows))
    plan = plan_step(lengths, constraints, group_ids=groups, prefixes=prefixes_of(rows))
    check(plan, rows, plan_step(lengths, constraints, group_ids=groups))
    home = random.integers(0, 2, len(rows))
    plan = plan_step(lengths, constraints, home_rank=home, prefixes=prefixes_of(rows))
    check(plan, rows, plan_step(lengths, constraints, home_rank=home))
    for rank in range(2):
        assert set(plan.rank_samples(rank)) == set(np.flatnonzero(home == rank))


def test_whole_groups_compute_every_position_once() -> None:
    random = np.random.default_rng(0)
    rows = []
    for _ in range(32):
        prompt = random.integers(0, 1000, 400)
        rows += [np.concatenate([prompt, random.integers(0, 1000, random.integers(40, 90))]) for _ in range(8)]
    lengths, prefixes = [len(row) for row in rows], prefixes_of(rows)
    plan = plan_step(lengths, PlanConstraints(dp_size=4, max_tokens=4096), prefixes=prefixes)
    assert plan.report.shared_tokens == 32 * 7 * 399
    assert plan.report.computed_tokens == sum(lengths) - 32 * 7 * 399
    assert plan.report.imbalance < 0.002


def test_a_tree_above_the_cap_is_cut_where_it_shares_least() -> None:
    random = np.random.default_rng(0)
    root = random.integers(0, 9, 20)
    rows = []
    for _ in range(2):
        branch = np.concatenate([root, random.integers(0, 9, 200)])
        rows += [np.concatenate([branch, random.integers(0, 9, 50)]) for _ in range(4)]
    prefixes = prefixes_of(rows)
    plan = plan_step([len(row) for row in rows], PlanConstraints(dp_size=1, max_tokens=430), prefixes=prefixes)
    batches = [sorted(int(i) for i in mb.samples) for mb in plan.micro_batches[0]]
    assert sorted(batches) == [[0, 1, 2, 3], [4, 5, 6, 7]]


@given(seed=st.integers(0, 10_000))
@settings(max_examples=20, deadline=None)
def test_without_fillers_trees_are_cut_into_as_many_parts_as_there_are_micro_batches(seed: int) -> None:
    random = np.random.default_rng(seed)
    prompt = random.integers(0, 9, 60)
    rows = [np.concatenate([prompt, random.integers(0, 9, random.integers(5, 40))]) for _ in range(16)]
    lengths, ranks = [len(row) for row in rows], int(random.integers(1, 9))
    constraints = PlanConstraints(dp_size=ranks, max_tokens=2000, fillers=False, min_num_micro_batches=16 // ranks)
    plan = plan_step(lengths, constraints, prefixes=prefixes_of(rows))
    check(plan, rows, plan_step(lengths, constraints))
    assert plan.report.fillers == 0
    with pytest.raises(PlanError, match="fewer samples than"):
        plan_step(lengths, PlanConstraints(dp_size=17, max_tokens=2000, fillers=False), prefixes=prefixes_of(rows))


@given(seed=st.integers(0, 10_000))
@settings(max_examples=20, deadline=None)
def test_groups_of_known_prefixes_are_those_of_the_tokens(seed: int) -> None:
    random = np.random.default_rng(seed)
    rows, groups, known = [], [], []
    for group in random.permutation(8):
        prompt = np.concatenate([[group], random.integers(100, 200, random.integers(0, 60))])
        for answer in range(random.integers(1, 6)):
            own = random.integers(200, 300, random.integers(0, 30))
            rows.append(np.concatenate([prompt, [300 + answer], own]))
            groups.append(int(group))
            known.append(len(prompt))
    chosen = random.permutation(len(rows))
    rows, groups, known = [rows[i] for i in chosen], [groups[i] for i in chosen], [known[i] for i in chosen]
    lengths = [len(row) for row in rows]
    constraints = PlanConstraints(dp_size=2, max_tokens=4096)
    told = plan_step(lengths, constraints, prefixes=SharedPrefixes.of_groups(groups, known, lengths))
    check(told, rows, plan_step(lengths, constraints))
    assert told.report.shared_tokens == plan_step(lengths, constraints, prefixes=prefixes_of(rows)).report.shared_tokens


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SharedPrefixes([0, 0], [0, 0]), "each index from 0 to 1 once"),
        (lambda: SharedPrefixes([0, 1], [3, 0]), "must begin with 0"),
        (lambda: SharedPrefixes([0, 1], [0, -1]), "no negative number"),
        (lambda: SharedPrefixes([0, 1], [0, 1, 2]), "expected (2,)"),
        (lambda: SharedPrefixes.of([-1, 2], [2]), "lie between -1 and 2: pass ids from 0 to 2^32 - 1"),
        (lambda: SharedPrefixes.of([1.5, 2], [2]), "must be integers"),
        (lambda: SharedPrefixes.of([1, 2, 3], [2]), "expected (2,)"),
        (lambda: SharedPrefixes.of_groups([0, 0], [20, 30], [40, 40]), "samples 0 and 1 of group 0 have prefixes of"),
        (lambda: SharedPrefixes.of_groups([0, 1], [20, 50], [40, 40]), "sample 1 of 40 tokens has a prefix of 50"),
        (lambda: SharedPrefixes.of_groups([0], [-1], [40]), "sample 0 of 40 tokens has a prefix of -1"),
        (lambda: plan_step([2, 3], PlanConstraints(dp_size=1, max_tokens=9), prefixes=[0]), "pass SharedPrefixes.of"),
        (
            lambda: plan_step(
                [2, 3], PlanConstraints(dp_size=1, max_tokens=9), prefixes=SharedPrefixes.of([1, 2], [2])
            ),
            "describe 1 samples and lengths 2",
        ),
        (
            lambda: plan_step(
                [2],
                PlanConstraints(dp_size=1, max_tokens=9, mode="dynamic"),
                prefixes=SharedPrefixes.of([1, 2], [2]),
            ),
            "mode 'packed' only",
        ),
    ],
)
def test_bad_prefixes_are_refused(make: Any, words: str) -> None:
    with pytest.raises(PlanError) as caught:
        make()
    assert words in str(caught.value)


def test_a_plan_that_takes_more_than_there_is_is_refused() -> None:
    row = np.arange(40)
    rows = [np.concatenate([row, [1, 2]]), np.concatenate([row, [3]])]
    plan = plan_step([42, 41], PlanConstraints(dp_size=1, max_tokens=90), prefixes=prefixes_of(rows))
    assert plan.report.shared_tokens == 39
    values = plan.to_dict()
    values["shared"] = [0, 60]
    with pytest.raises(PlanError, match="takes 60 of its"):
        Plan.from_dict(values)
    values["shared"] = [39, 39]
    with pytest.raises(PlanError, match="takes 39 of its"):
        Plan.from_dict(values)


def test_a_cap_can_count_what_samples_share_for_each_of_them() -> None:
    joined = {True: 0, False: 0}
    for seed in range(20):
        rows = samples_of(seed)
        lengths = np.array([len(row) for row in rows])
        for counts in joined:
            constraints = PlanConstraints(
                dp_size=1, max_tokens=int(lengths.max()) + 40, cap_counts_shared=counts, objective="rank_total"
            )
            plan = plan_step(lengths, constraints, prefixes=prefixes_of(rows))
            whole = [int(lengths[pack.samples].sum()) for pack in plan.micro_batches[0]]
            joined[counts] += max(whole) > constraints.max_tokens
    assert joined[True] == 0 and joined[False] > 5
