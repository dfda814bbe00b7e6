"""MoE auxiliary and z-losses: their gradients as Megatron defines them, in both scalings and with fillers; no padding.

What is compared is the gradient that the coefficients add: a run with them minus a run without.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.losses.steps import make_strategy
from tests.support.models import ARCHITECTURE
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.loss

HERE = "tests.losses.test_router_losses:"
EXPERTS = {"num_experts": 4, "router_topk": 2, "ffn_hidden_size": 24}


def batch(lengths: list[int], pad: int = 0) -> Any:
    from roll_batching.samples import FieldSpec, SampleBatch

    g = torch.Generator().manual_seed(2)
    rows = [torch.randint(0, 61, (n,), generator=g) for n in lengths]
    masks = [torch.arange(n) > n // 2 for n in lengths]
    kinds = {"input_ids": FieldSpec("token", pad), "response_mask": FieldSpec("token", 0)}
    return SampleBatch.from_lists({"input_ids": rows, "response_mask": masks}, kinds)


Coefficients = tuple[float, float]
"""Of the auxiliary loss and of the z-loss."""
BOTH, Z_ALONE, NONE = (0.1, 0.1), (0.0, 0.1), (0.0, 0.0)


def gradients(
    bins: list[list[list[int]]], lengths: list[int], coefficients: Coefficients, mode: str, pad: int, **megatron: Any
) -> Any:
    """Whole gradients of SFT over the samples of the given micro-batches."""
    from roll_batching.losses import SFTLoss
    from roll_batching.planning import Plan
    from roll_batching.samples import distribute, gather_lengths
    from tests.losses.steps import mine
    from tests.support.models import whole_gradients

    moe = EXPERTS | dict(zip(("aux_loss_coeff", "z_loss_coeff"), coefficients, strict=True))
    strategy = make_strategy(mode, architecture=ARCHITECTURE | {"num_layers": 4, "moe": moe}, megatron=megatron)
    named = sorted(i for rank in bins for micro_batch in rank for i in micro_batch)
    local = mine(strategy, batch(lengths, pad).select(named))
    table = gather_lengths(local)
    at = {sample: i for i, sample in enumerate(table.ids.tolist())}
    placed = [[[at[i] for i in b] for b in rank] for rank in bins]
    constraints = strategy.plan(table).constraints
    plan = Plan.from_bins(placed, table.lengths, constraints, ids=table.ids, location=table.location)
    assert not strategy.train_step(distribute(local, plan), plan, SFTLoss()).skipped
    sharded = megatron.get("use_distributed_optimizer", False)
    return whole_gradients(strategy.chunks, 61, strategy.layout.tp_rank, sharded)


def added(
    bins: list[list[list[int]]],
    lengths: list[int],
    mode: str = "packed",
    coefficients: Coefficients = BOTH,
    pad: int = 0,
    **megatron: Any,
) -> torch.Tensor:
    """The part of the gradient that router losses add, as one vector."""
    plain, more = (gradients(bins, lengths, which, mode, pad, **megatron) for which in (NONE, coefficients))
    assert more["spread"] < 1e-4
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


def of_models_of_other_depths(_: None) -> None:
    bins, lengths = [[[0, 1], [2, 3]]], [5, 20, 9, 17]
    gradients(bins, lengths, BOTH, "packed", 0)
    gradients(bins, lengths, BOTH, "packed", 0, mtp_num_layers=1)


def of_two(case: tuple[int, int]) -> list[torch.Tensor]:
    """The added gradient for two samples in one micro-batch, by recompute; a second rank has a filler."""
    dp_size, ep_size = case
    bins, lengths = [[[0, 1]], [[]]][:dp_size], [12, 20]
    whole, mixtures = {"recompute_granularity": "full"}, {"recompute_granularity": "selective"}
    recomputed = [whole, mixtures | {"recompute_modules": ["moe"]}]
    return [added(bins, lengths, expert_model_parallel_size=ep_size, **x) for x in recomputed]


def check(ranks: int, function: str, payload: Any, report: Any) -> None:
    for difference, size in run_ranks(ranks, HERE + function, payload):
        assert size > 1e-3
        assert difference < 1e-4
    report(f"router losses, {function} on {ranks}: differ by {difference:.1e}")


def micro_batches_of_other_sizes(_: None) -> tuple[float, float, float, float]:
    """Differences of the added gradient, of 13 and of 53 tokens: between the scalings; of each from its weights."""
    lengths, joint = [13, 53], [[[0], [1]]]
    tokens, equal = (added(joint, lengths, calculate_per_token_loss=per_token) for per_token in (True, False))
    single = [added([[[sample]]], lengths) for sample in (0, 1)]
    by_tokens = (lengths[0] * single[0] + lengths[1] * single[1]) / sum(lengths)
    plain = [gradients(joint, lengths, NONE, "packed", 0, calculate_per_token_loss=x) for x in (True, False)]
    of_loss = max(relative(plain[0][n], plain[1][n]) for n in plain[0] if n != "spread")
    return relative(tokens, equal), relative(tokens, by_tokens), relative(equal, sum(single) / 2), of_loss


@pytest.mark.parametrize("ranks", [1, 2])
def test_router_losses_weigh_the_same_in_both_scalings(ranks: int, report) -> None:
    check(ranks, "both_scalings", ranks, report)


def test_the_scalings_weigh_micro_batches_of_other_sizes_as_documented(report) -> None:
    """By tokens or equally, as docs/configuration.md says; the loss itself depends on neither."""
    between, by_tokens, equally, of_loss = run_ranks(1, HERE + "micro_batches_of_other_sizes")[0]
    assert between > 1e-2, "the scalings weigh micro-batches of 13 and 53 tokens alike: say so in the reference"
    assert max(by_tokens, equally) < 1e-4 and of_loss < 1e-5
    report(f"router losses, 13 and 53 tokens: scalings {between:.1%}, weights {by_tokens:.1e} and {equally:.1e}")


def test_padding_adds_nothing_to_router_losses(report) -> None:
    check(1, "padded_and_packed", None, report)


def test_a_model_with_more_layers_than_the_first_of_the_process_trains() -> None:
    """As a policy with heads of multi-token prediction beside a critic without any."""
    run_ranks(1, HERE + "of_models_of_other_depths", timeout=300)


def test_a_filler_adds_nothing_to_router_losses() -> None:
    """And ranks that share experts with it and recompute them do not hang."""
    (alone,) = run_ranks(1, HERE + "of_two", (1, 1))
    for ep_size in (1, 2):
        for beside_a_filler in run_ranks(2, HERE + "of_two", (2, ep_size), timeout=90):
            for found, expected in zip(beside_a_filler, alone, strict=True):
                assert relative(found, expected) < 1e-4


def of_four(megatron: dict[str, Any]) -> list[torch.Tensor]:
    """The added gradient for four samples in two micro-batches, by recompute; a second replica has two fillers."""
    bins: list[list[list[int]]] = [[[0, 1], [2, 3]], [[], []]]
    found = []
    for options in ({"recompute_granularity": "full"}, {"recompute_granularity": "selective"}):
        if options["recompute_granularity"] == "selective":
            options = options | {"recompute_modules": ["moe", "core_attn"]}
        found.append(added(bins if megatron else bins[:1], [12, 20, 16, 8], **options, **megatron))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"overlap_grad_reduce": True, "use_distributed_optimizer": True}])
def test_two_fillers_do_not_hang_a_pipeline(more: dict[str, Any]) -> None:
    stages = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    (alone,) = run_ranks(1, HERE + "of_four", {})
    for rank in run_ranks(4, HERE + "of_four", stages | {"expert_model_parallel_size": 2} | more, timeout=90):
        for found, expected in zip(rank, alone, strict=True):
            assert relative(found, expected) < 1e-4


# ---- layouts

TENSOR = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PIPELINE = {"pipeline_model_parallel_size": 2}
CHUNKS = PIPELINE | {"virtual_pipeline_model_parallel_size": 2}
CONTEXT = {"context_parallel_size": 2, "expert_model_parallel_size": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "tensor, sequence and pipeline parallel": TENSOR | PIPELINE,
    "with virtual stages": TENSOR | CHUNKS,
    "tensor, sequence, context and expert parallel": TENSOR | CONTEXT,
    "pipeline with virtual stages, context and expert parallel": CHUNKS | CONTEXT,
}
PACK_AND_FILLER = [[[0, 1], []]]
TWO_PACKS, EVEN, UNEVEN = [[[0, 1], [2, 3]]], [12, 20, 16, 8], [5, 20, 9, 17]


def in_layouts(names: list[str]) -> dict[str, dict[str, torch.Tensor]]:
    """The added gradient by layout, without padding and with much padding."""
    from megatron.core import parallel_state

    found = {}
    for name in names:
        layout = LAYOUTS[name]
        found[name] = {
            # The auxiliary loss weighs the parts of a pack that ranks hold by their tokens: equal ones, to compare.
            "both losses": added(TWO_PACKS, EVEN, **layout),
            "both losses, mean of micro-batches": added(TWO_PACKS, EVEN, calculate_per_token_loss=False, **layout),
            "both losses, beside a filler": added(PACK_AND_FILLER if layout else [[[0, 1]]], EVEN[:2], **layout),
            "z-loss, packed": added(TWO_PACKS, UNEVEN, coefficients=Z_ALONE, **layout),
            "z-loss, padded": added(TWO_PACKS, UNEVEN, "padded", Z_ALONE, **layout),
            "both losses, padded with 0": added(TWO_PACKS, UNEVEN, "padded", **layout),
            "both losses, padded with 7": added(TWO_PACKS, UNEVEN, "padded", pad=7, **layout),
        }
        parallel_state.destroy_model_parallel()
    return found


USUAL, *OTHERS = list(LAYOUTS)[1:]


@pytest.mark.parametrize("layouts", [[USUAL], pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["usual", "others"])
def test_every_layout_adds_what_one_process_adds(layouts: list[str], report) -> None:
    """With sequence parallelism Megatron shards the padding mask on the first stage only."""
    expected = run_ranks(1, HERE + "in_layouts", ["one rank"])[0]["one rank"]
    for name, found in run_ranks(4, HERE + "in_layouts", layouts, timeout=300)[0].items():
        by_padding = "both losses, padded with 0", "both losses, padded with 7"
        gaps = {case: relative(found[case], expected[case]) for case in expected if case not in by_padding}
        gaps["padded with another id"] = relative(*(found[case] for case in by_padding))
        report(f"router losses, {name}: worst {max(gaps.values()):.1e} ({max(gaps, key=lambda case: gaps[case])})")
        assert max(gaps.values()) < 1e-4, gaps
