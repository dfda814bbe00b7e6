"""The eight invariants on random plans; each check fails on a plan that breaks its invariant."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from roll_batching.planning import LinearQuadraticCost, PlanConstraints, plan_step
from tests.planning import cases as c

pytestmark = pytest.mark.planning

RELAXED = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]


def test_all_invariants_on_random_plans(random_plans, report):
    seen = {"plans": 0, "refused": 0}

    @settings(max_examples=random_plans, deadline=None, suppress_health_check=RELAXED)
    @given(c.cases())
    def check(case):
        plan = c.plan_or_none(case)
        if plan is None:
            seen["refused"] += 1
            return
        seen["plans"] += 1
        view = c.view_of(plan)
        for check_one in c.CHECKS:
            check_one(case, view)
        c.check_8_integer_and_repeatable(case, plan, case.plan())

    check()
    report(f"invariants 1 to 8 on {seen['plans']} random plans ({seen['refused']} cases refused by name)")
    assert seen["plans"] > seen["refused"]


def example(**more):
    rng = np.random.default_rng(0)
    values = {"dp_size": 2, "max_tokens": 64, "cp_size": 2, **more}
    lengths = rng.integers(1, 29, 24).tolist()
    constraints = PlanConstraints(**values)
    return c.Case(lengths, constraints, LinearQuadraticCost(100, 1), [i // 2 for i in range(24)], None)


def place_twice(view):
    view.micro_batches[0][0]["samples"][0] = view.micro_batches[0][1]["samples"][0]


def lose_a_micro_batch(view):
    view.micro_batches[1].pop()


def empty_without_a_filler(view):
    view.micro_batches[0][0]["samples"] = []


def one_more_micro_batch(view):
    view.num_micro_batches += 1
    view.group_size = None


def exceed_the_cap(view):
    view.micro_batches[0][0]["tokens"] = view.micro_batches[0][0]["padded_length"] = 68


def misalign_a_slot(view):
    view.micro_batches[0][0]["slots"][0] -= 1


def part_a_pair(view):
    first, second = view.micro_batches[0][0]["samples"], view.micro_batches[0][1]["samples"]
    first[0], second[0] = second[0], first[0]


def add_fillers(view):
    for rank in view.micro_batches:
        rank.extend(copy.deepcopy(rank[-1]) for _ in range(9))
    view.num_micro_batches += 9


def reverse_one_rank(view):
    view.micro_batches[0].reverse()


MUTATIONS = [
    (c.check_1_every_sample_once, place_twice, {}),
    (c.check_2_equal_counts_and_fillers, lose_a_micro_batch, {}),
    (c.check_2_equal_counts_and_fillers, empty_without_a_filler, {}),
    (c.check_3_interleaving_rule, one_more_micro_batch, {"pp_size": 4, "vpp_size": 2}),
    (c.check_4_cap_and_alignment, exceed_the_cap, {}),
    (c.check_4_cap_and_alignment, misalign_a_slot, {}),
    (c.check_5_groups_stay_together, part_a_pair, {}),
    (c.check_6_no_more_than_first_fit_decreasing, add_fillers, {}),
    (c.check_7_balance, reverse_one_rank, {}),
    (c.check_7_balance, reverse_one_rank, {"objective": "lockstep"}),
]


@pytest.mark.parametrize(("check", "mutate", "more"), MUTATIONS)
def test_each_check_fails_when_its_invariant_is_broken(check, mutate, more):
    case = example(**more)
    view = c.view_of(case.plan())
    check(case, view)
    mutate(view)
    with pytest.raises(AssertionError):
        check(case, view)


def test_rank_totals_that_are_not_level_are_seen():
    case = example(objective="rank_total")
    view = c.view_of(case.plan())
    c.check_7_balance(case, view)
    for mb in view.micro_batches[1]:
        mb["lengths"] = [1] * len(mb["lengths"])
    with pytest.raises(AssertionError):
        c.check_7_balance(case, view)


def test_a_planner_that_is_not_repeatable_is_seen():
    case = example()
    other = plan_step(case.lengths[::-1], case.constraints, cost=case.cost)
    with pytest.raises(AssertionError):
        c.check_8_integer_and_repeatable(case, case.plan(), other)
