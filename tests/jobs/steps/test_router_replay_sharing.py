"""Router replay with shared prefixes: what samples share follows the experts that a step replays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.exact import EXACT, OF_ROUTERS
from tests.support.ranks import run_ranks

HERE = "tests.jobs.steps.test_router_replay_sharing:"
NOISE = 0.02


def recorded_by_a_noisy_router(logprob_plan: str) -> list[tuple[float, int]]:
    """Of each optimizer step: the gap to log-probs of unshared packs, and shared tokens.

    Routers of the pass of old log-probs read noise, as where kernels round by the place of a token in its pack: samples
    of a group in different packs record different experts for their prompt.
    """
    from roll_batching.jobs.steps.update import train_on_rollouts
    from roll_batching.samples import collect, distribute, gather_lengths
    from tests.strategy.test_shared_inputs import batch_of, loss_of, make_model
    from tests.support.layouts import Layout

    strategy = make_model(Layout(), logprob_plan=logprob_plan)
    packs = strategy.state.batching  # of log-probs: too small for a group
    packs = replace(packs, infer=replace(packs.infer, max_tokens=100))
    strategy.state = replace(strategy.state, batching=packs)
    g = torch.Generator().manual_seed(6)

    def add_noise(router: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        hidden, *others = inputs
        return (hidden + NOISE * torch.randn(hidden.shape, generator=g), *others)

    hooks = []
    for layer in strategy.chunks[0].modules():
        if (router := getattr(getattr(layer, "mlp", None), "router", None)) is not None:
            hooks.append(router.register_forward_pre_hook(add_noise))
    train_step, steps = strategy.train_step, []

    def compared(local: Any, plan: Any, *arguments: Any, **options: Any) -> Any:
        for hook in hooks:
            hook.remove()
        plans = plan, strategy.plan(gather_lengths(local))
        first, second = (
            collect(strategy.forward(distribute(local, one), one), one, like=local)["log_probs"] for one in plans
        )
        steps.append((float((first - second).abs().max()), plan.report.shared_tokens))
        return train_step(local, plan, *arguments, **options)

    strategy.train_step = compared
    batch = batch_of(0.0).without("routed_experts").without("old_log_probs")
    list(train_on_rollouts(strategy, batch, loss_of(), mini_batch_size=6, epochs=2, seed=5, router_replay=True))
    return steps


@pytest.mark.parametrize("logprob_plan", ["train", "own"])
def test_recorded_experts_split_what_later_steps_share(logprob_plan: str) -> None:
    (steps,) = run_ranks(1, HERE + "recorded_by_a_noisy_router", logprob_plan)
    assert len(steps) == 4
    assert max(gap for gap, _ in steps) < EXACT, steps
    assert sum(shared for _, shared in steps) > 0


def trained_on_replies(share: bool) -> list[tuple[float, float, int]]:
    """Loss, gradient norm and shared tokens of each optimizer step with experts of engine replies."""
    from roll_batching.jobs.engines.protocol import Mixture
    from roll_batching.jobs.engines.routed_experts import with_experts
    from roll_batching.jobs.steps.update import train_on_rollouts
    from tests.jobs.engines.test_replayed_gradients import result_of
    from tests.losses.steps import mine
    from tests.strategy.test_shared_inputs import CHANGED, EXPERTS, LAYERS, TOP, batch_of, loss_of, make_model
    from tests.support.layouts import Layout

    mixture = Mixture(num_layers=LAYERS, layers=tuple(range(LAYERS)), top_k=TOP, num_experts=EXPERTS)
    strategy = make_model(Layout(dp=2))
    strategy.state = replace(strategy.state, batching=replace(strategy.state.batching, share_prefixes=share))
    whole = batch_of(CHANGED, first=30).without("old_log_probs")
    local = mine(strategy, whole)
    results = [
        result_of(number, experts.numpy(), mixture) for number, experts in enumerate(local.to_lists("routed_experts"))
    ]
    local = with_experts(local.without("routed_experts"), results, mixture)
    return [
        (result.loss, result.grad_norm, plan.report.shared_tokens)
        for plan, result in train_on_rollouts(strategy, local, loss_of(), mini_batch_size=6, epochs=2, seed=5)
    ]


def test_experts_of_engine_replies_split_what_samples_share(report: Any) -> None:
    shared, apart = (run_ranks(2, HERE + "trained_on_replies", share)[0] for share in (True, False))
    for (loss, norm, tokens), (right, right_norm, none) in zip(shared, apart, strict=True):
        report(f"{tokens} tokens shared: loss {loss / right - 1:.1e}, gradient norm {norm / right_norm - 1:.1e}")
        assert tokens > none == 0
        assert max(abs(loss / right - 1), abs(norm / right_norm - 1)) < OF_ROUTERS
