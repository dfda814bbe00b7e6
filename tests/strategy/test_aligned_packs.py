"""Packs aligned as FP8 needs, and packs of few lengths, give the loss, gradients and log-probs of others.

In fp32: the alignment adds filler and changes nothing else. What FP8 itself rounds is compared on a GPU
(`scripts/gpu_checks.sh --only fp8`).
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

from tests.support.layouts import Layout
from tests.support.ranks import meet, part, run_ranks

pytestmark = pytest.mark.layouts

HERE = "tests.strategy.test_aligned_packs:"
MODES = ("packed", "dynamic", "padded")
CORE = [Layout(tp=2, sp=True), Layout(cp=2)]
MATRIX = [
    Layout(dp=2, distopt=True),
    Layout(pp=2),
    Layout(tp=2, sp=True, cp=2),
    Layout(pp=2, vpp=2, cp=2),
    Layout(pp=2, slices=3),
    Layout(tp=2, sp=True, dp=2, ep=2, moe=True),
    Layout(dp=2, pp=2, recompute=True),
]
LIMIT = 1e-5


def compare(payload: tuple[list[dict[str, Any]], list[int]]) -> list[str]:
    """Cases whose aligned step differs from the plain one, with how much."""

    layouts, multiples = payload
    found = []
    for index, layout in enumerate(layouts):
        meet(index)
        found += _compare(Layout(**layout), multiples)
        part()
    return found


def _step(strategy: Any, local: Any, plan: Any) -> tuple[Any, Any, Any]:
    """Result, gradients and log-probs of a step from the same weights."""
    from roll_batching.losses import PolicyLoss
    from roll_batching.samples import collect, distribute
    from tests.losses.steps import refill
    from tests.support.models import whole_gradients

    refill(strategy)
    log_probs = collect(strategy.compute_log_probs(distribute(local, plan), plan), plan, like=local)["log_probs"]
    loss = PolicyLoss(clip_low=0.2, clip_high=0.28, kl_coef=0.05, kl_bound=None, entropy_coef=0.02)
    result = strategy.train_step(distribute(local, plan), plan, loss)
    sharded = strategy._require_config().strategy_args.strategy_config.use_distributed_optimizer
    return result, whole_gradients(strategy.chunks, 61, strategy.layout.tp_rank, sharded), log_probs


def _compare(layout: Layout, multiples: list[int]) -> list[str]:
    from roll_batching.samples import gather_lengths
    from tests.losses.steps import gap, make_strategy, mine
    from tests.support.models import ARCHITECTURE, random_batch

    experts = {"moe": {"num_experts": 4, "router_topk": 2, "ffn_hidden_size": 24}} if layout.moe else {}
    shape = {**ARCHITECTURE, "num_layers": max(2, layout.pp * layout.vpp), **experts}
    ranks, found = layout.cp * (layout.tp if layout.sp else 1), []
    for mode in MODES:
        strategy = make_strategy(mode, 64, architecture=shape, megatron=layout.megatron())
        local = mine(strategy, random_batch(31, 9, 40))
        table = gather_lengths(local)
        result, gradients, log_probs = _step(strategy, local, strategy.plan(table))
        for multiple, shapes in [*((one, None) for one in multiples), (1, 1), (1, 3)]:
            if shapes is not None and mode != "packed":
                continue
            state = strategy.state
            cap = max(64, 2 * multiple * ranks)
            spec, forward = (
                one if one.max_tokens is None else replace(one, max_tokens=cap, pack_shapes=shapes)
                for one in (state.batching.train, state.batching.infer)
            )
            strategy.state = replace(
                state,
                settings=replace(state.settings, pack_multiple=multiple),
                batching=replace(state.batching, train=spec, infer=forward),
            )
            plan = strategy.plan(table)
            strategy.state = state
            packs = [mb for rank in plan.micro_batches for mb in rank]
            assert all(mb.tokens % ranks == 0 and mb.tokens // ranks % multiple == 0 for mb in packs)
            assert spec.max_tokens is None or all(mb.tokens <= cap for mb in packs)
            assert shapes is None or len({mb.tokens for mb in packs}) <= shapes
            assert sum(mb.tokens for mb in packs) > sum(int(mb.lengths.sum()) for mb in packs)
            other = _step(strategy, local, plan)
            gaps = [*gap(other[:2], (result, gradients)), float((other[2] - log_probs).abs().max())]
            if max(gaps) > LIMIT:
                found.append(f"{layout} {mode} {multiple} {shapes}: {gaps}")
    return found


def _run(layouts: list[Layout], multiples: list[int]) -> None:
    differing = []
    for ranks in sorted({layout.ranks for layout in layouts}):
        same = [asdict(layout) for layout in layouts if layout.ranks == ranks]
        for found in run_ranks(ranks, HERE + "compare", (same, multiples), timeout=900):
            differing += found
    assert not differing, "\n".join(differing)


def test_alignment_changes_neither_loss_nor_gradients() -> None:
    _run(CORE, [16])


@pytest.mark.slow
def test_nor_in_other_layouts_and_with_larger_multiples() -> None:
    _run(MATRIX, [16, 32, 128])
    _run(CORE, [32, 128])
