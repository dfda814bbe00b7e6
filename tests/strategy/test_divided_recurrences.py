"""Recurrent layers under context parallelism along the sequence: the step of data-parallel ranks, for every CP size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
import torch

from tests.strategy.test_shared_prefixes import batch, losses, make_model
from tests.strategy.test_trees_with_states import EXACT, MODELS, SHAPE
from tests.support.layouts import Layout
from tests.support.ranks import meet, part, run_ranks

HERE = "tests.strategy.test_divided_recurrences:"
SLOW = (pytest.mark.slow, pytest.mark.layouts)
TREES = ("three levels", "branches one token apart", "groups")


def gaps(payload: tuple[str, list[dict[str, Any]]]) -> dict[str, float]:
    """Largest relative difference of losses and gradients of each layout from the first, with and without prefixes."""
    from roll_batching.samples import distribute, find_shared_prefixes, gather_lengths
    from tests.losses.steps import gap, mine, refill
    from tests.support.models import ARCHITECTURE, whole_gradients

    model, layouts = payload
    shape = {**ARCHITECTURE, **MODELS[model], **SHAPE}
    steps: dict[str, dict[Any, Any]] = {}
    for number, values in enumerate(layouts):
        layout = Layout(**values)
        meet(number)
        strategy = make_model(critic=False, architecture=shape, megatron=layout.megatron(), dtype="fp64")
        of_layout = steps.setdefault(str(layout), {})
        for kind in TREES:
            local = mine(strategy, batch(kind, torch.Generator().manual_seed(3)))
            table = gather_lengths(local)
            for shares, lengths in ((False, table), (True, find_shared_prefixes(local, table))):
                plan = strategy.plan(lengths)
                refill(strategy)
                result = strategy.train_step(distribute(local, plan), plan, losses()["sft"])
                tp_rank = strategy.layout.tp_rank
                of_layout[kind, shares] = result.loss, whole_gradients(strategy.chunks, 61, tp_rank, False)
        part()
    first, *others = steps.items()
    return {name: max(max(gap(found[case], first[1][case])) for case in found) for name, found in others}


def _check(model: str, ranks: int, layouts: list[Layout], report: Callable[[str], None]) -> None:
    every = [asdict(layout) for layout in (Layout(dp=ranks), *layouts)]
    for of_rank in run_ranks(ranks, HERE + "gaps", (model, every), timeout=900):
        for name, found in of_rank.items():
            report(f"{model}, {name.removesuffix(' fp32')} against data-parallel ranks: within {found:.1e}")
            assert found < EXACT, (name, found)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("divide", ["sequence", *(pytest.param(way, marks=SLOW) for way in ("auto", "heads"))])
def test_two_ranks(model: str, divide: str, report: Callable[[str], None]) -> None:
    _check(model, 2, [Layout(cp=2, divide=divide), Layout(cp=2, divide=divide, recompute=True)], report)


@pytest.mark.slow
@pytest.mark.layouts
@pytest.mark.parametrize("model", MODELS)
def test_more_ranks_than_heads(model: str, report: Callable[[str], None]) -> None:
    _check(model, 8, [Layout(cp=8)], report)
    several = (
        []
        if MODELS[model].get("hybrid", {}).get("mamba_num_groups") == 1
        else [Layout(tp=2, sp=True, cp=2, divide="sequence")]
    )
    several += [
        Layout(cp=4, divide="sequence"),
        Layout(pp=2, cp=2, divide="sequence"),
        Layout(pp=2, vpp=2, cp=2, divide="sequence", recompute=True),
    ]
    _check(model, 4, several, report)
