"""FLOPs of a plan, with and without shared prefixes."""

from __future__ import annotations

import pytest

from roll_batching.modeling.cost import plan_flops
from roll_batching.planning import FlopsCost, PlanConstraints, SharedPrefixes, plan_step


def test_flops_of_a_plan_count_shared_prefixes_once_and_unshared_flops_for_each_sample() -> None:
    cost = FlopsCost(linear=10, quadratic=3)
    rules = PlanConstraints(dp_size=1, max_tokens=400, tp_size=2)
    prefixes = SharedPrefixes.of([*range(50), 98, 99, *range(50), 97], [52, 51])
    plan = plan_step([52, 51], rules, prefixes=prefixes)
    assert plan.report.shared_tokens == 49
    whole = 10.0 * (52 + 51) + 3.0 * (52**2 + 51**2)
    assert plan_flops(plan, cost, rules, sharing=False) == plan_flops(plan_step([52, 51], rules), cost, rules)
    assert plan_flops(plan, cost, rules, sharing=False) == pytest.approx(2 * whole)
    assert plan_flops(plan, cost, rules) == pytest.approx(2 * (whole - 10.0 * 49 - 3.0 * 49**2))
