"""A packing algorithm outside the package: one function in one file, named by its dotted path."""

from __future__ import annotations

import numpy as np
import pytest

from roll_batching.errors import PlanError
from roll_batching.jobs.config import config_from_dict
from roll_batching.planning import PlanConstraints, plan_step
from roll_batching.planning.registry import ALGORITHMS

pytestmark = pytest.mark.planning

OWN = "tests.planning.own_packers"
LENGTHS = np.random.default_rng(3).integers(1, 1000, 120)


def test_a_packer_of_ones_own_is_named_in_the_yaml_and_gets_all_that_the_planner_does_for_its_own():
    role = {
        "use_sequence_packing": True,
        "sequence_packing_args": {"algorithm": f"{OWN}:tightest", "max_packed_sequence_length_train": 2048},
    }
    batching = config_from_dict({"actor_train": role}).actor_train.batching().train
    assert batching.algorithm == f"{OWN}:tightest"
    for more in ({}, {"pp_size": 2, "vpp_size": 2}, {"cp_size": 2, "tp_size": 2, "sequence_parallel": True}):
        constraints = PlanConstraints(dp_size=4, max_tokens=2048, algorithm=batching.algorithm, **more)
        plan = plan_step(LENGTHS, constraints)
        assert sorted(plan.samples.tolist()) == list(range(120)) and plan.tokens.max() <= 2048
        assert plan.num_micro_batches % more.get("pp_size", 1) == 0
    at_home = plan_step(LENGTHS, PlanConstraints(dp_size=4, max_tokens=2048, algorithm=f"{OWN}:tightest"),
                        home_rank=np.arange(120) % 4)  # fmt: skip
    assert all(sample % 4 == rank for rank in range(4) for sample in at_home.rank_samples(rank).tolist())


def test_it_is_this_packer_that_forms_the_packs():
    plan = plan_step([600, 500, 400, 300], PlanConstraints(dp_size=1, max_tokens=1000, algorithm=f"{OWN}:tightest"))
    packs = {frozenset(one.samples.tolist()) for one in plan.micro_batches[0]}
    assert packs == {frozenset({0, 2}), frozenset({1, 3})}


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("forgets_the_last", r"each of 120 items into exactly one bin: item \d+ is in 0 bins"),
        ("takes_one_twice", "item 0 is in 2 bins"),
        ("invents_an_item", "an index is not one of an item"),
        ("fills_over_the_cap", r"bin 0 of \d+ tokens, capacity 2048"),
        ("leaves_a_bin_empty", "bin 0 of 0 tokens"),
        ("returns_no_bins", "must return lists of item indices"),
        ("returns_halves", "returned bins of float64"),
        ("NOT_A_FUNCTION", "is a int, not a function"),
        ("missing", "has no 'missing'"),
        ("leaves", r"raised SystemExit: 0 at .*own_packers.py"),
        ("looks_for_what_is_not_there", r"raised KeyError: 'bins' at .*own_packers.py:\d+"),
    ],
)
def test_a_packer_that_breaks_the_contract_is_named(name, words):
    with pytest.raises(PlanError, match=words) as caught:
        plan_step(LENGTHS, PlanConstraints(dp_size=4, max_tokens=2048, algorithm=f"{OWN}:{name}"))
    assert f"{OWN}:{name}" in str(caught.value)


@pytest.mark.parametrize(("mode", "name"), [(mode, entry.name) for mode, reg in ALGORITHMS.items() for entry in reg])
def test_every_registered_algorithm_plans_by_its_name(mode, name):
    plan = plan_step(LENGTHS, PlanConstraints(dp_size=2, max_tokens=4096, mode=mode, algorithm=name))
    assert plan.constraints.algorithm == name and len(plan.samples) == 120


def test_rectangles_go_by_the_same_way():
    constraints = PlanConstraints(dp_size=2, max_tokens=4096, mode="dynamic", algorithm=f"{OWN}:one_by_one")
    with pytest.raises(PlanError, match="has no 'one_by_one'"):
        plan_step(LENGTHS, constraints)
    packed_as_rectangles = PlanConstraints(dp_size=2, max_tokens=4096, mode="dynamic", algorithm=f"{OWN}:tightest")
    with pytest.raises(PlanError, match="no bin may be empty or above it"):  # rows times the longest is above the cap
        plan_step(LENGTHS, packed_as_rectangles)
