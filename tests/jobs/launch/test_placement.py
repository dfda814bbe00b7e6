"""Placement of ranks on Ray's machines, and their environments."""

from __future__ import annotations

import os

import pytest

from roll_batching.jobs.driver.rank import StrategyRank
from roll_batching.jobs.launch.on_ray.actors import Rank, inherited_variables, split_secrets
from roll_batching.jobs.launch.on_ray.cluster import RankPlacement, bundle_size, place_ranks
from roll_batching.jobs.launch.on_ray.restarts import RoleRank


@pytest.mark.parametrize(
    ("tp_size", "largest_machine", "size"),
    [(1, 8, 1), (2, 8, 2), (8, 8, 8), (8, 4, 4), (6, 4, 3), (4, 1, 1), (2, 0, 1)],
)
def test_a_tensor_parallel_group_lies_on_one_machine_where_it_fits(tp_size, largest_machine, size):
    assert bundle_size(tp_size, largest_machine) == size


def test_ranks_fill_one_machine_after_the_other_whatever_the_order_of_the_bundles():
    found = place_ranks(["b", "a", "b", "a"], 2)
    assert [one.rank for one in found] == list(range(8))
    assert [one.node for one in found] == ["b"] * 4 + ["a"] * 4
    assert [one.bundle for one in found] == [0, 0, 2, 2, 1, 1, 3, 3]
    assert [one.local_rank for one in found] == [0, 1, 2, 3, 0, 1, 2, 3]


def test_machines_may_hold_different_numbers_of_ranks():
    found = place_ranks(["a", "b", "a"], 1)
    assert found[2] == RankPlacement(rank=2, node="b", bundle=1, local_rank=0, local_size=1)
    assert [one.local_size for one in found] == [2, 2, 1]


def test_the_environment_goes_along_without_secrets():
    given = {"NCCL_DEBUG": "INFO", "PYTHONPATH": "here", "HF_HOME": "/models", "HF_TOKEN": "hf_x", "HOME": "/root"}
    assert inherited_variables(given) == {"HF_HOME": "/models", "NCCL_DEBUG": "INFO", "PYTHONPATH": "here"}


def test_keys_reach_ranks_on_another_way_than_ray_shows():
    given = {"WANDB_API_KEY": "sk-1", "NCCL_DEBUG": "INFO"}
    assert split_secrets(given) == ({"NCCL_DEBUG": "INFO"}, {"WANDB_API_KEY": "sk-1"})


def test_a_rank_has_its_keys_before_anything_is_asked_of_it(monkeypatch):
    monkeypatch.setattr(os, "environ", {})
    for kind in (Rank, RoleRank, StrategyRank):
        rank = kind(3, {"WANDB_API_KEY": "sk-1"})
        assert os.environ.pop("WANDB_API_KEY") == "sk-1"
        assert "sk-1" not in repr(rank)
