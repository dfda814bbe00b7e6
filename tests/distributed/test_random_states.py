"""Random states on the CPU platform: equal on replicas, different for experts, restored by Megatron."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.models import ARCHITECTURE
from tests.support.ranks import run_ranks

HERE = "tests.distributed.test_random_states:"
MOE = {"num_experts": 4, "router_topk": 2, "ffn_hidden_size": 24}
TENSOR: dict[str, Any] = {"tensor_model_parallel_size": 2}


def _started(architecture: dict[str, Any], **megatron: Any) -> Any:
    """A training strategy with the weights that it draws itself."""
    from roll_batching.strategy import MegatronTrainStrategy
    from tests.support.models import worker_config

    shape = ARCHITECTURE | {"init_std": 0.2} | architecture
    config = worker_config("packed", 64, architecture=shape, megatron=megatron, logprob_plan="own")
    strategy = MegatronTrainStrategy(config, seed=5)
    strategy.initialize()
    return strategy


def _step(strategy: Any, seed: int) -> float:
    from roll_batching.losses import SFTLoss
    from roll_batching.samples import distribute, gather_lengths
    from tests.losses.steps import mine
    from tests.support.models import random_batch

    local = mine(strategy, random_batch(seed, 6, 20))
    plan = strategy.plan(gather_lengths(local))
    return float(strategy.train_step(distribute(local, plan), plan, SFTLoss()).loss)


def replicas(folder: str) -> dict[str, Any]:
    """Of experts under tensor and sequence parallelism: this rank's router, and losses going on and resumed."""
    from megatron.core import parallel_state

    options = {"sequence_parallel": True, "recompute_granularity": "full", **TENSOR}
    strategy = _started({"moe": MOE}, **options)
    router = strategy.chunks[0].module.decoder.layers[0].mlp.router.weight.detach().clone()
    _step(strategy, 1)
    queued = len(torch.cuda._queued_calls)
    strategy.save(folder)
    going_on = [_step(strategy, seed) for seed in (2, 3)]
    parallel_state.destroy_model_parallel()
    resumed = _started({"moe": MOE}, **options)
    resumed.load(folder)
    return {
        "router": router,
        "going on": going_on,
        "resumed": [_step(resumed, seed) for seed in (2, 3)],
        "queued in two steps": len(torch.cuda._queued_calls) - queued,
    }


def test_replicas_of_a_router_start_equal_and_resume_exactly(tmp_path: Any) -> None:
    one, other = run_ranks(2, HERE + "replicas", str(tmp_path / "saved"))
    assert torch.equal(one["router"], other["router"])
    for rank in (one, other):
        assert rank["going on"] == rank["resumed"]
        assert rank["queued in two steps"] == 0


def dropped(options: dict[str, Any]) -> dict[str, Any]:
    """Whole gradients of one step with dropout."""
    from tests.support.models import whole_gradients

    strategy = _started({"hidden_dropout": 0.3}, **options)
    _step(strategy, 1)
    return whole_gradients(strategy.chunks, 61, strategy.layout.tp_rank, False)


@pytest.mark.parametrize("options", [{}, pytest.param({"sequence_parallel": True}, marks=pytest.mark.slow)])
def test_dropout_drops_the_same_on_replicas_and_in_recomputed_layers(options: dict[str, Any]) -> None:
    from tests.support.models import worst_difference

    plain, recomputed = (
        run_ranks(2, HERE + "dropped", TENSOR | options | more)[0] for more in ({}, {"recompute_granularity": "full"})
    )
    assert plain["spread"] < 1e-5
    assert recomputed["spread"] < 1e-5
    assert worst_difference(recomputed, plain)[0] < 1e-5


def experts(options: dict[str, Any]) -> list[torch.Tensor]:
    """First weights of this rank's experts, one row for each of all layers."""
    strategy = _started({"moe": MOE}, **options)
    layers = [layer for chunk in strategy.chunks for layer in chunk.module.decoder.layers]
    weights = [p for layer in layers for n, p in layer.mlp.experts.named_parameters() if "linear_fc" in n]
    return [weight.detach().flatten()[:20].clone() for weight in weights]


@pytest.mark.parametrize(
    ("ranks", "options"),
    [(2, {}), pytest.param(4, {"pipeline_model_parallel_size": 2}, marks=pytest.mark.slow)],
)
def test_every_expert_starts_with_different_weights(ranks: int, options: dict[str, Any]) -> None:
    """Whatever ranks and stages have it; a layer of two matrices for each of four experts, in two layers."""
    everyone = run_ranks(ranks, HERE + "experts", {"expert_model_parallel_size": 2, **options})
    drawn = {tuple(row.tolist()) for rank in everyone for row in rank}
    assert len(drawn) == 2 * 2 * MOE["num_experts"]
