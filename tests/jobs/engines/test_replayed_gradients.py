"""Router replay R3: experts out of an engine's reply give the gradients of a router that chose them by itself.

Expert biases move the choice and not the weights of experts. A router with biases chooses, its choice is put into
replies as SGLang and vLLM write them, and a router without biases, which would choose others, replays it.
"""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import pytest
import torch

from roll_batching.jobs.engines.protocol import GenerationResult, Mixture
from tests.support.exact import DTYPE, EXACT
from tests.support.layouts import Layout
from tests.support.ranks import run_ranks

HERE = "tests.jobs.engines.test_replayed_gradients:"
MIXTURE = Mixture(num_layers=4, layers=(1, 2, 3), top_k=2, num_experts=8)
MOE = {
    "num_experts": MIXTURE.num_experts,
    "router_topk": MIXTURE.top_k,
    "ffn_hidden_size": 24,
    "router_score_function": "sigmoid",
    "router_expert_bias": True,
    "layer_freq": [0, 1, 1, 1],
}


def result_of(number: int, experts: np.ndarray, mixture: Mixture = MIXTURE) -> GenerationResult:
    """The result of an engine that returns `experts` [tokens, layers with experts, top-k] of a sample.

    Samples of even numbers come from SGLang, the others from vLLM.
    """
    from roll_batching.jobs.engines.routed_experts import checked_experts, decode_int32, decode_npy

    tokens = len(experts)
    raw = np.zeros((tokens - 1, mixture.num_layers, mixture.top_k), dtype="<i4")  # the last one is not computed
    raw[:, list(mixture.layers)] = experts[:-1]
    if number % 2:
        file = io.BytesIO()
        np.save(file, raw.astype(np.uint8))
        decoded = decode_npy(base64.b64encode(file.getvalue()).decode())
    else:
        decoded = decode_int32(base64.b64encode(raw.tobytes()).decode())
    prompt = (tokens + 2) // 3
    response = [0] * (tokens - prompt)
    result = GenerationResult(tokens=response, log_probs=[-1.0] * len(response))
    return GenerationResult(
        tokens=result.tokens, log_probs=result.log_probs, experts=checked_experts(decoded, mixture, prompt, result)
    )


def compare(layout: Layout) -> tuple[float, float, float]:
    """Relative differences from the router with biases: of gradients by replay and by a free router, and of losses."""
    from roll_batching.jobs.engines.routed_experts import with_experts
    from roll_batching.samples import collect, distribute, gather_lengths
    from tests.losses.steps import make_strategy, mine
    from tests.strategy.test_router_replay import loss_of
    from tests.support.models import ARCHITECTURE, random_batch, whole_gradients, worst_difference

    shape = {**ARCHITECTURE, "num_layers": MIXTURE.num_layers, "moe": MOE}
    strategy = make_strategy(architecture=shape, megatron=layout.megatron(), dtype=DTYPE)
    local = mine(strategy, random_batch(40, 9, 40))

    def bias(scale: float) -> None:
        for chunk in strategy.chunks:
            for layer in chunk.modules():
                router = getattr(getattr(layer, "mlp", None), "router", None)
                if router is not None:
                    generator = torch.Generator().manual_seed(layer.layer_number)
                    router.expert_bias.copy_(scale * torch.randn(MIXTURE.num_experts, generator=generator))

    def gradients(batch: Any) -> tuple[float, dict[str, Any]]:
        plan = strategy.plan(gather_lengths(batch))
        strategy.zero_grad()
        loss, _ = strategy.forward_backward(distribute(batch, plan), plan, loss_of())
        return loss, whole_gradients(strategy.chunks, 61, strategy.layout.tp_rank, layout.distopt)

    bias(1.0)
    plan = strategy.plan(gather_lengths(local), forward=True)
    found = strategy.forward(distribute(local, plan), plan, ("log_probs", "routed_experts"))
    chosen = collect(found, plan, like=local).to_lists("routed_experts")
    loss, expected = gradients(local)
    bias(0.0)
    results = [result_of(number, experts.numpy()) for number, experts in enumerate(chosen)]
    replayed_loss, replayed = gradients(with_experts(local, results, MIXTURE))
    _, free = gradients(local)
    gap = max(worst_difference(replayed, expected)[0], replayed["spread"])
    names = expected.keys() - {"spread"}
    other = torch.stack([(free[name] - expected[name]).norm() for name in names]).norm()
    norm = torch.stack([expected[name].norm() for name in names]).norm()
    return gap, float(other / norm), abs(replayed_loss - loss) / abs(loss)


def check(layout: Layout, report: Any) -> None:
    for replayed, free, loss in run_ranks(layout.ranks, HERE + "compare", layout):
        report(f"{layout}: replayed {replayed:.1e}, loss {loss:.1e}; a router that chooses by itself {free:.1e}")
        assert replayed < EXACT and loss < EXACT and free > 0.1


def test_experts_of_replies_give_the_gradients_of_a_router_that_chose_them(report: Any) -> None:
    check(Layout(), report)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [Layout(cp=2), Layout(pp=2), Layout(dp=2, ep=2), Layout(tp=2, sp=True, recompute=True)], ids=str
)
def test_in_layouts(layout: Layout, report: Any) -> None:
    check(layout, report)
