"""Samples share a position only where all inputs of the forward pass agree, replayed experts among them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from tests.support.exact import DTYPE, EXACT, OF_ROUTERS
from tests.support.layouts import Layout
from tests.support.models import ARCHITECTURE
from tests.support.ranks import run_ranks

HERE = "tests.strategy.test_shared_inputs:"
LAYERS, EXPERTS, TOP = 4, 8, 2
MOE = {"num_experts": EXPERTS, "router_topk": TOP, "ffn_hidden_size": 24}
CHANGED = 0.02
"""Of the (token, layer) pairs of each sample."""
CAP = 320


def experts_of(tokens: int, g: torch.Generator) -> torch.Tensor:
    return torch.rand(tokens, LAYERS, EXPERTS, generator=g).topk(TOP).indices.to(torch.int16)


def batch_of(changed: float, first: int = 0) -> Any:
    """Three groups of prompts of 60 tokens, whose samples replay the prompt's experts.

    Of their (token, layer) pairs from token `first` on, a part `changed` has other experts.
    """
    from roll_batching.samples import FieldSpec, SampleBatch
    from roll_batching.samples.fields import EXPERTS_SPEC

    g = torch.Generator().manual_seed(4)
    rows, experts = [], []
    for _ in range(3):
        prompt, routes = torch.randint(0, 61, (60,), generator=g), experts_of(60, g)
        for size in (9, 20, 3, 14):
            rows.append(torch.cat([prompt, torch.randint(0, 61, (size,), generator=g)]))
            mine = torch.cat([routes, experts_of(size, g)])
            others = torch.rand(len(mine), LAYERS, generator=g) < changed
            others[:first] = False
            mine[others] = experts_of(len(mine), g)[others]
            experts.append(mine)
    n = [len(row) for row in rows]
    fields = {
        "input_ids": rows,
        "routed_experts": experts,
        "response_mask": [torch.rand(k, generator=g) < 0.7 for k in n],
        "advantages": torch.randn(len(rows), generator=g),
        "old_log_probs": [-4.1 + 0.3 * torch.randn(k, generator=g) for k in n],
    }
    schema = {
        "input_ids": "token", "routed_experts": EXPERTS_SPEC, "response_mask": "token", "advantages": "sample",
        "old_log_probs": FieldSpec("next_token"),
    }  # fmt: skip
    order = torch.randperm(len(rows), generator=g)
    return SampleBatch.from_lists(fields, schema).select(order)


def make_model(layout: Layout, **options: Any) -> Any:
    from tests.losses.steps import make_strategy

    shape = {**ARCHITECTURE, "num_layers": LAYERS, "moe": MOE}
    return make_strategy(cap=CAP, architecture=shape, megatron=layout.megatron(), dtype=DTYPE, **options)


def loss_of() -> Any:
    from roll_batching.losses import PolicyLoss

    return PolicyLoss(clip_low=0.2, clip_high=0.28, kl_coef=0.0, entropy_coef=0.02)


def refusal(call: Callable[..., Any], *arguments: Any) -> str:
    from roll_batching.errors import RollBatchingError

    try:
        call(*arguments)
    except RollBatchingError as error:
        return str(error)
    return "nothing"


def compare(layout: dict[str, Any]) -> list[tuple[float, float, float, int, int]]:
    """For equal, other and later other experts: gaps of loss, gradients and log-probs; shared tokens, and all."""
    from roll_batching.samples import collect, distribute, gather_lengths
    from tests.losses.steps import gap, mine, step

    shape = Layout(**layout)
    strategy = make_model(shape)
    found = []
    for whole in (batch_of(0), batch_of(CHANGED), batch_of(CHANGED, first=40)):
        local = mine(strategy, whole)
        plans = strategy.plan(strategy.gather_table(local)), strategy.plan(gather_lengths(local))
        gaps = gap(*(step(strategy, whole, loss_of(), plan) for plan in plans))
        first, second = (
            collect(strategy.forward(distribute(local, plan), plan), plan, like=local)["log_probs"] for plan in plans
        )
        report = plans[0].report
        assert report.computed_tokens <= plans[1].report.computed_tokens
        found.append((*gaps, float((first - second).abs().max()), report.shared_tokens, report.real_tokens))
    return found


LAYOUTS = [Layout(), Layout(cp=2)]
MORE = [Layout(dp=2, ep=2), Layout(tp=2, sp=True), Layout(pp=2, vpp=2), Layout(pp=2, recompute=True)]
SLOW = [pytest.mark.slow, pytest.mark.layouts]


@pytest.mark.parametrize("layout", [*LAYOUTS, *(pytest.param(one, marks=SLOW) for one in MORE)], ids=str)
def test_replayed_experts_split_what_is_shared(layout: Layout, report: Any) -> None:
    for equal, differing, late in run_ranks(layout.ranks, HERE + "compare", asdict(layout)):
        report(f"{layout}: equal experts {equal}, {CHANGED:.0%} others {differing}, behind token 40 {late}")
        for loss, gradient, log_probs, *_ in (equal, differing, late):
            assert max(loss, log_probs) < EXACT and gradient < OF_ROUTERS
        assert equal[3] > late[3] > differing[3], "a tree is cut at the first token with other experts"


def refusals(_: None) -> dict[str, str]:
    """Answers to plans that share rows whose inputs differ."""
    from roll_batching.planning import SharedPrefixes
    from roll_batching.samples import LengthTable, distribute, find_shared_prefixes, gather_lengths
    from tests.losses.steps import mine

    strategy = make_model(Layout(dp=2))
    local = mine(strategy, batch_of(CHANGED))
    without = local.without("routed_experts")
    table = gather_lengths(local)
    groups = SharedPrefixes.of_groups(table.ids // 4, [60] * len(table), table.lengths)
    tables: dict[str, LengthTable] = {
        "tokens alone": find_shared_prefixes(without, table),
        "groups": replace(table, prefixes=groups),
    }
    found = {}
    for name, shared in tables.items():
        plan = strategy.plan(shared)
        placed = distribute(local, plan)
        found[name] = refusal(strategy.train_step, placed, plan, loss_of())
        found[f"{name}, forward"] = refusal(strategy.forward, placed, plan)
        found[f"{name}, without experts"] = refusal(strategy.forward, placed.without("routed_experts"), plan)
    plan = strategy.plan(tables["groups"])
    placed = distribute(without, plan)
    ids = placed["input_ids"].clone()
    ids[30] = (ids[30] + 1) % 61
    other = placed.with_fields({"input_ids": ids}, {"input_ids": "token"})
    found["other tokens"] = refusal(strategy.forward, other, plan)
    return found


def test_a_plan_that_shares_unequal_rows_is_refused_on_all_ranks() -> None:
    for found in run_ranks(2, HERE + "refusals"):
        for name in ("tokens alone", "groups", "tokens alone, forward", "groups, forward"):
            assert "routed_experts" in found[name] and "share" in found[name], (name, found)
        for name in ("tokens alone, without experts", "groups, without experts"):
            assert found[name] == "nothing"
        assert "input_ids" in found["other tokens"]
