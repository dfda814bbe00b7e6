"""MoE auxiliary and z-losses: their gradients as Megatron defines them, in both scalings and with fillers; no padding.

What is compared is the gradient that the coefficients add: a run with them minus a run without.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from tests.losses.steps import make_strategy
from tests.support.models import ARCHITECTURE
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.loss

HERE = "tests.losses.test_router_losses:"
EXPERTS = {"num_experts": 4, "router_topk": 2, "ffn_hidden_size": 24}


def _runs_here() -> bool:
    """Before 0.19 the router's product comes from TransformerEngine alone."""
    import megatron.core

    version = tuple(int(part) for part in megatron.core.__version__.split(".")[:2])
    return version >= (0, 19) or importlib.util.find_spec("transformer_engine") is not None


def batch(lengths: list[int]) -> Any:
    from roll_batching.data import SampleBatch

    g = torch.Generator().manual_seed(2)
    rows = [torch.randint(0, 61, (n,), generator=g) for n in lengths]
    masks = [torch.arange(n) > n // 2 for n in lengths]
    columns = {"input_ids": rows, "response_mask": masks}
    return SampleBatch.from_lists(columns, dict.fromkeys(columns, "token"))


def gradients(bins: list[list[list[int]]], lengths: list[int], coefficient: float, mode: str, **megatron: Any) -> Any:
    """Whole gradients of SFT over the given micro-batches."""
    from roll_batching.data import distribute, gather_lengths
    from roll_batching.losses import SFTLoss
    from roll_batching.planning import Plan
    from tests.losses.steps import mine
    from tests.support.models import whole_gradients

    moe = EXPERTS | {"aux_loss_coeff": coefficient, "z_loss_coeff": coefficient}
    strategy = make_strategy(mode, architecture=ARCHITECTURE | {"moe": moe}, megatron=megatron)
    local = mine(strategy, batch(lengths))
    table = gather_lengths(local)
    at = {sample: i for i, sample in enumerate(table.ids.tolist())}
    placed = [[[at[i] for i in b] for b in rank] for rank in bins]
    constraints = strategy.plan(table).constraints
    plan = Plan.from_bins(placed, table.lengths, constraints, ids=table.ids, location=table.location)
    assert not strategy.train_step(distribute(local, plan), plan, SFTLoss()).skipped
    return whole_gradients(strategy.chunks, 61, 0, False)


def added(bins: list[list[list[int]]], lengths: list[int], mode: str = "packed", **megatron: Any) -> torch.Tensor:
    """What the router losses add to the gradient, as one vector."""
    plain, more = (gradients(bins, lengths, coefficient, mode, **megatron) for coefficient in (0.0, 0.1))
    return torch.cat([(more[n] - plain[n]).reshape(-1) for n in sorted(plain) if n != "spread"])


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def both_scalings(dp_size: int) -> tuple[float, float]:
    """Micro-batches of as many tokens each: (difference between the scalings, size of what is added)."""
    bins = [[[0, 1], [2, 3]]] if dp_size == 1 else [[[0, 1]], [[2, 3]]]
    lengths = [13, 20, 16, 17]
    mean = added(bins, lengths, calculate_per_token_loss=False)
    return relative(added(bins, lengths, calculate_per_token_loss=True), mean), float(mean.norm())


def padded_and_packed(_: None) -> tuple[float, float]:
    """The same micro-batches without and with padding: (difference, size of what is added)."""
    bins, lengths = [[[0, 1], [2, 3]]], [5, 20, 9, 17]
    packed = added(bins, lengths)
    return relative(added(bins, lengths, "padded"), packed), float(packed.norm())


def of_two(dp_size: int) -> torch.Tensor:
    """What is added for two samples in one micro-batch; on two ranks the other one has a filler."""
    return added([[[0, 1]], [[]]][:dp_size], [12, 20], recompute_granularity="full")


needs_moe = pytest.mark.skipif(not _runs_here(), reason="this Megatron runs MoE with TransformerEngine only")


def check(ranks: int, function: str, payload: Any, report: Any) -> None:
    for difference, size in run_ranks(ranks, HERE + function, payload):
        assert size > 1e-3
        assert difference < 1e-4
    report(f"router losses, {function} on {ranks}: differ by {difference:.1e}")


@needs_moe
@pytest.mark.parametrize("ranks", [1, 2])
def test_router_losses_weigh_the_same_in_both_scalings(ranks: int, report) -> None:
    check(ranks, "both_scalings", ranks, report)


@needs_moe
def test_padding_adds_nothing_to_router_losses(report) -> None:
    check(1, "padded_and_packed", None, report)


@needs_moe
def test_a_filler_adds_nothing_to_router_losses() -> None:
    (alone,) = run_ranks(1, HERE + "of_two", 1)
    for beside_a_filler in run_ranks(2, HERE + "of_two", 2):
        assert relative(beside_a_filler, alone) < 1e-4
