"""Optimizers whose ranks step unlike parameters: their checkpoints load where they were saved, and elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.layouts import Layout
from tests.support.ranks import run_ranks

CASES = "tests.strategy.test_checkpoint:"
STAGES = Layout(pp=2, dp=2, ep=2)


def _case(path: Any, dtype: str, experts_in: list[int], layout: Layout) -> dict[str, Any]:
    moe = {"num_experts": 4, "router_topk": 2, "ffn_hidden_size": 12, "layer_freq": experts_in}
    return {"path": str(path / "state"), "dtype": dtype, "architecture": {"moe": moe}, "layout": layout.megatron()}


@pytest.mark.parametrize(
    ("dtype", "experts_in"),
    [
        ("bf16", [0, 0, 1, 1]),
        pytest.param("bf16", [1, 1, 0, 0], marks=pytest.mark.slow),
        pytest.param("fp32", [0, 0, 1, 1], marks=pytest.mark.slow),
        pytest.param("fp32", [1, 1, 0, 0], marks=pytest.mark.slow),
    ],
)
def test_a_stage_without_experts_loads_its_own_checkpoint(tmp_path: Any, dtype: str, experts_in: list[int]) -> None:
    case = _case(tmp_path, dtype, experts_in, STAGES)
    before = run_ranks(4, CASES + "save_and_go_on", case)
    after = run_ranks(4, CASES + "load_and_go_on", case)
    for (tensors, expected), (found, again) in zip(before, after, strict=True):
        assert tensors.keys() == found.keys() and len(tensors) > 20
        assert not [name for name in tensors if not torch.equal(tensors[name], found[name])]
        assert again == expected


@pytest.mark.slow
@pytest.mark.parametrize("elsewhere", [Layout(), Layout(dp=2, ep=2, distopt=True), Layout(pp=2, vpp=2)], ids=str)
def test_it_loads_in_other_layouts(tmp_path: Any, elsewhere: Layout) -> None:
    """Whatever optimizer they have."""
    expected = run_ranks(4, CASES + "save_and_go_on", _case(tmp_path, "fp32", [0, 0, 1, 1], STAGES))[0][1]
    ((_, found), *_) = run_ranks(
        elsewhere.ranks, CASES + "load_and_go_on", _case(tmp_path, "fp32", [0, 0, 1, 1], elsewhere)
    )
    for there, here in zip(found, expected, strict=True):
        assert abs(there[0] - here[0]) < 1e-4 * abs(here[0])
        assert there[2] == here[2]
