"""Models with recurrent layers whose samples share prefixes: the same step as without sharing, in every layout.

Trees, losses and the comparison are those of `test_shared_prefixes`. Masks count tokens of every node of a tree.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.strategy.test_shared_prefixes import ONE_TREE, VALUES, batch, gaps_of, kinds, losses, make_model
from tests.support.layouts import Layout
from tests.support.ranks import meet, part, run_ranks

HERE = "tests.strategy.test_trees_with_states:"

EXACT, IN_FP32 = 1e-10, 5e-6
OF_FP32 = ("three levels", "groups", "branches one token apart")
_DELTA = {"num_key_heads": 4, "num_value_heads": 8, "key_head_dim": 6, "value_head_dim": 5}
_MAMBA = {"mamba_num_heads": 8, "mamba_head_dim": 6, "mamba_num_groups": 4, "mamba_state_dim": 5}
MODELS: dict[str, dict[str, Any]] = {
    "gated delta nets": {"gated_delta_net": _DELTA | {"layers": (1, 1, 0, 1)}},
    "Mamba-2": {"hybrid": _MAMBA | {"pattern": "MM*-"}},
    "Mamba-2, more context-parallel ranks than groups": {"hybrid": _MAMBA | {"mamba_num_groups": 1, "pattern": "M*M-"}},
}
SHAPE = {"num_layers": 4, "norm_epsilon": 1e-3}
"""Products of queries and keys near zero are normalised with their rounding, so epsilon is large, for fp32."""
ONE_RANK = [Layout(), Layout(recompute=True)]
SEVERAL = [Layout(tp=2, sp=True), Layout(pp=2, vpp=2), Layout(cp=2), Layout(dp=2, cp=2, divide="sequence")]
MORE = [
    *(Layout(tp=2), Layout(pp=2), Layout(cp=2, recompute=True), Layout(pp=2, vpp=2, recompute=True)),
    *(Layout(tp=2, sp=True, cp=2), Layout(pp=2, cp=2), Layout(cp=4), Layout(tp=2, sp=True, pp=2, vpp=2)),
    *(Layout(tp=2, sp=True, recompute=True), Layout(dp=2)),
]
CASES = [
    *(("three levels", "policy"), ("branches one token apart", "policy"), ("a group above the cap", "sft")),
    (ONE_TREE, "sft"),
]


def _compare(model: str, layouts: list[Layout], cases: list[tuple[str, str]], report: Callable[[str], None]) -> None:
    gaps = gaps_of(layouts, cases, MODELS[model] | SHAPE)
    for layout in layouts:
        largest = max(gap.largest for gap in gaps if gap.case.startswith(f"{layout} "))
        name = str(layout).removesuffix(f" {layout.dtype}")  # the results are fp64
        report(f"{model}, shared prefixes against apart, {name}: within {largest:.1e}")
    assert not (differing := [gap for gap in gaps if gap.largest > EXACT]), "\n".join(map(str, differing))


@pytest.mark.parametrize("model", MODELS)
def test_every_kind_of_tree_on_one_rank(model: str, report: Callable[[str], None]) -> None:
    _compare(model, ONE_RANK, [(kind, "policy") for kind in kinds()], report)


@pytest.mark.parametrize("model", list(MODELS)[:2])
def test_layouts(model: str, report: Callable[[str], None]) -> None:
    _compare(model, SEVERAL, CASES, report)


def test_a_group_of_Mamba_heads_on_several_ranks(report: Callable[[str], None]) -> None:
    _compare("Mamba-2, more context-parallel ranks than groups", [Layout(cp=2)], CASES, report)


def errors_in_fp32(model: str) -> dict[str, float]:
    """Worst relative errors of a step in fp32 against fp64 apart: of losses, and of gradients shared and apart."""
    from roll_batching.samples import distribute, find_shared_prefixes, gather_lengths
    from tests.losses.steps import gap, mine, refill
    from tests.support.models import ARCHITECTURE, whole_gradients

    shape, steps = ARCHITECTURE | MODELS[model] | SHAPE, {}
    for number, dtype in enumerate(("fp64", "fp32")):
        meet(number)
        strategy = make_model(critic=False, architecture=shape, megatron=Layout().megatron(), dtype=dtype)
        for kind in OF_FP32:
            local = mine(strategy, batch(kind, torch.Generator().manual_seed(3)))
            table = gather_lengths(local)
            for name, lengths in (("apart", table), ("shared", find_shared_prefixes(local, table))):
                plan = strategy.plan(lengths)
                refill(strategy)
                result = strategy.train_step(distribute(local, plan), plan, losses()["sft"])
                gradients = whole_gradients(strategy.chunks, 61, 0, False)
                doubled = {key: x.double() if isinstance(x, torch.Tensor) else x for key, x in gradients.items()}
                steps[kind, dtype, name] = result.loss, doubled
        part()
    gaps = {
        name: [gap(steps[kind, "fp32", name], steps[kind, "fp64", "apart"]) for kind in OF_FP32]
        for name in ("apart", "shared")
    }
    return {"loss": max(loss for loss, _ in gaps["shared"])} | {
        name: max(gradients for _, gradients in of_name) for name, of_name in gaps.items()
    }


@pytest.mark.parametrize("model", MODELS)
def test_in_fp32_sharing_rounds_no_worse(model: str, report: Callable[[str], None]) -> None:
    """Gradients of decays and norms lose digits in fp32, apart as well: the same step in fp64 is the right result."""
    (errors,) = run_ranks(1, HERE + "errors_in_fp32", model, timeout=300)
    report(
        f"{model}, a step in fp32 against fp64: loss within {errors['loss']:.1e}, "
        f"worst gradient {errors['shared']:.1e} with shared prefixes and {errors['apart']:.1e} without"
    )
    assert errors["loss"] < IN_FP32
    assert errors["shared"] < 2 * errors["apart"]


@pytest.mark.slow
@pytest.mark.layouts
@pytest.mark.parametrize("model", list(MODELS)[:2])
def test_more_layouts(model: str, report: Callable[[str], None]) -> None:
    _compare(model, MORE, CASES, report)


@pytest.mark.slow
@pytest.mark.layouts
@pytest.mark.parametrize("model", list(MODELS)[:2])
def test_every_loss(model: str, report: Callable[[str], None]) -> None:
    cases = [(kind, name) for kind in kinds() for name in losses() if name != VALUES]
    _compare(model, [Layout()], cases, report)
    _compare(model, [Layout()], [(kind, VALUES) for kind in kinds()], report)
