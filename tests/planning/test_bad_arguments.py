"""Arguments of wrong types and sizes raise a `PlanError` with their name; numpy integers are accepted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from roll_batching.errors import PlanError
from roll_batching.planning import LinearQuadraticCost, Plan, PlanConstraints, plan_step
from roll_batching.planning.planner import RolePlanner

pytestmark = pytest.mark.planning

LENGTHS = [7, 3, 9, 4]


def _constraints(**more: Any) -> PlanConstraints:
    return PlanConstraints(**{"dp_size": 2, "max_tokens": 16, **more})


def _with_gradient() -> Any:
    torch = pytest.importorskip("torch")
    return torch.tensor([7.0, 3.0, 9.0, 4.0], requires_grad=True)


def _planned(**more: Any) -> Plan:
    return plan_step(**{"lengths": LENGTHS, "constraints": _constraints(), **more})


def _bins(bins: Any) -> Plan:
    return Plan.from_bins(bins, LENGTHS, _constraints(max_tokens=32))


class _FractionalFixed:
    fixed = 0.5

    def sequence(self, length: int) -> int:
        return length


class _HugeFixed(_FractionalFixed):
    fixed = 1 << 90


def _role() -> RolePlanner:
    return RolePlanner(train=_constraints(), infer=_constraints(), cost=LinearQuadraticCost())


CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "constraints that are a dict": (lambda: _planned(constraints={"dp_size": 2}), "constraints is a dict"),
    "constraints that are the class": (lambda: _planned(constraints=PlanConstraints), "constraints is the class"),
    "a cost that is a function": (lambda: _planned(cost=lambda n: n), "cost is a function"),
    "a cost that is the class": (lambda: _planned(cost=LinearQuadraticCost), "cost is the class"),
    "a cost that is a number": (lambda: _planned(cost=3), "cost is a int"),
    "a cost of fractions": (lambda: _planned(cost=_FractionalFixed()), r"_FractionalFixed\.fixed=0\.5"),
    "lengths with a gradient": (lambda: _planned(lengths=_with_gradient()), "lengths .*detach"),
    "lengths that are ragged": (lambda: _planned(lengths=[[1, 2], [3]]), "lengths"),
    "lengths that are text": (lambda: _planned(lengths="7394"), "lengths"),
    "lengths that are None": (lambda: _planned(lengths=None), "lengths"),
    "lengths beyond all memory": (lambda: _planned(lengths=[1 << 62, 1 << 62]), "lengths"),
    "a length below 64 bits": (lambda: _planned(lengths=[-1e300, 3.0]), "lengths must fit into 64 bits"),
    "lengths for a table": (lambda: _role().plan(LENGTHS), "table is a list: .*gather_lengths"),  # type: ignore[arg-type]
    "no table": (lambda: _role().balanced_homes(None), "table is a NoneType"),  # type: ignore[arg-type]
    "ids that are a dict": (lambda: _planned(ids={1: 2}), "ids"),
    "ids with a gradient": (lambda: _planned(ids=_with_gradient()), "ids"),
    "group_ids that are text": (lambda: _planned(group_ids=["a", "a", "b", "b"]), "group_ids must be integers"),
    "homes that are a number": (lambda: _planned(home_rank=1), "home_rank has shape"),
    "a cap of 2**63": (lambda: _constraints(max_tokens=1 << 63), "max_tokens is 9223372036854775808"),
    "rows of 2**63": (lambda: _constraints(mode="padded", rows=1 << 63), "rows is 9223372036854775808"),
    "an alignment of 2**80": (lambda: _constraints(sequence_multiple=1 << 80), "sequence_multiple is"),
    "alignments that multiply": (
        lambda: _constraints(
            mode="padded", rows=2, max_tokens=None, sequence_multiple=(1 << 39) - 1, pack_multiple=1 << 39
        ),
        "together align to",
    ),
    "a size of text": (lambda: _constraints(dp_size="2"), "dp_size is '2'; it must be an integer"),
    "a size of truth": (lambda: _constraints(cp_size=True), "cp_size is True; it must be an integer"),
    "numpy truth": (lambda: _constraints(cp_size=np.bool_(True)), "cp_size is .*True.*; it must be an integer"),
    "a size of 2**63": (lambda: _constraints(dp_size=1 << 63), "dp_size is .* at most 1099511627776"),
    "a switch of text": (
        lambda: _constraints(tp_size=2, sequence_parallel="no"),
        "sequence_parallel is 'no'; it must be True or False",
    ),
    "another switch": (lambda: _constraints(shared_shapes=1), "shared_shapes is 1; it must be True or False"),
    "an algorithm that is a number": (lambda: _constraints(algorithm=3), "algorithm=3"),
    "a mode that is a list": (
        lambda: _constraints(mode=["packed"]),
        "mode is .*; it must be one of packed, dynamic, padded",
    ),
    "bins of truth": (lambda: _bins([[[True, False]], [[2, 3]]]), "bins.*bool"),
    "bins of fractions": (lambda: _bins([[[0.5, 1]], [[2, 3]]]), "bins"),
    "bins of text": (lambda: _bins([["01"], [[2, 3]]]), "bins"),
    "bins without a list of micro-batches": (lambda: _bins([[0, 1], [2, 3]]), r"bins\[0\]\[0\]"),
    "bins that are a number": (lambda: _bins(3), "bins"),
    "bins of a rank that are None": (lambda: _bins([None, [[2, 3]]]), r"bins\[0\]"),
    "bins that are a dict": (lambda: _bins({0: [[0, 1]], 1: [[2, 3]]}), "bins"),
    "a plan that is a list": (lambda: Plan.from_dict([]), "Plan.from_dict"),  # type: ignore[arg-type]
    "a plan that lacks its constraints' sizes": (
        lambda: Plan.from_dict(_planned().to_dict() | {"constraints": {"dp": 2}}),
        "constraints",
    ),
    "a plan with text for numbers": (lambda: Plan.from_dict(_planned().to_dict() | {"lengths": ["x"] * 4}), "lengths"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_bad_argument_is_one_error_that_names_it(name: str) -> None:
    make, words = CASES[name]
    with pytest.raises(PlanError, match=words):
        make()


def test_numpy_integers_and_switches_are_integers_and_switches() -> None:
    given = {
        "dp_size": 2,
        "max_tokens": 16,
        "tp_size": 2,
        "min_num_micro_batches": 1,
        "seed": 3,
        "sequence_multiple": 2,
    }
    plain = PlanConstraints(**given, sequence_parallel=True)
    for kind in (np.int64, np.int32, np.uint8):
        found = PlanConstraints(
            **{name: kind(value) for name, value in given.items()}, sequence_parallel=np.bool_(True)
        )
        assert found == plain and found.to_dict() == plain.to_dict()
        assert all(type(value) is int for name, value in found.to_dict().items() if name in given)
        assert plan_step(LENGTHS, found) == plan_step(LENGTHS, plain)


def test_a_cost_of_any_size_plans() -> None:
    for pipeline in ({}, {"pp_size": 2}, {"pp_size": 2, "vpp_size": 2}):
        for cost in (_HugeFixed(), LinearQuadraticCost(fixed=1 << 90)):
            plan = _planned(cost=cost, constraints=_constraints(**pipeline))
            assert plan.report.real_tokens == sum(LENGTHS)
