"""`train_on_rollouts` with router replay: every optimizer step has the experts of the pass of old log-probs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.ranks import run_ranks

HERE = "tests.jobs.steps.test_router_replay:"
SAMPLES = 12


class Gaps:
    """A policy loss whose metrics are the largest and the mean difference of log-probs from the old ones."""

    needs, masks = frozenset({"log_probs"}), ("response_mask",)

    def token_loss(self, tokens: Any) -> Any:
        from roll_batching.losses import LossOutput, Max

        ratio = (tokens.log_probs - tokens["old_log_probs"]).exp()
        gap = (tokens.log_probs - tokens["old_log_probs"]).abs()[tokens.mask()].max()
        return LossOutput(-tokens.mean(ratio * tokens.expand(tokens["advantages"])), {"gap": Max(gap.detach())})


def trained(payload: dict[str, Any]) -> dict[str, Any]:
    """Gaps of the optimizer steps, and the experts that the packs of each step replayed, by sample."""
    from roll_batching.jobs.steps.update import train_on_rollouts
    from roll_batching.samples import distribute, gather_lengths
    from roll_batching.strategy import MegatronTrainStrategy
    from tests.strategy.test_router_replay import LAYERS, ROUTERS
    from tests.support.models import ARCHITECTURE, fill, random_batch, worker_config

    shape = {**ARCHITECTURE, "num_layers": LAYERS, "moe": ROUTERS["softmax"]}
    config = worker_config(
        "packed", 64, architecture=shape, megatron=payload["layout"], logprob_plan=payload["plan"],
        training={"learning_rate": 2e-2},
    )  # fmt: skip
    strategy = MegatronTrainStrategy(config)
    strategy.initialize()
    fill(strategy.chunks, 61, strategy.layout.tp_rank, strategy.layout.tp_size)
    strategy.optimizer.reload_model_params()
    batch = random_batch(3, SAMPLES, 30).without("old_log_probs").without("ref_log_probs")
    home = batch.select(torch.arange(strategy.layout.dp_rank, SAMPLES, strategy.layout.dp_size))
    plan = strategy.plan(gather_lengths(home))
    first = strategy.forward(distribute(home, plan), plan, ("log_probs", "routed_experts"))
    own = {int(i): first.select_ids([int(i)])["routed_experts"] for i in first.ids}
    steps: list[dict[int, torch.Tensor]] = []
    train_step = strategy.train_step

    def noted(local: Any, *arguments: Any, **options: Any) -> Any:
        if "routed_experts" in local:
            steps.append({int(i): local.select_ids([int(i)])["routed_experts"] for i in local.ids})
        return train_step(local, *arguments, **options)

    strategy.train_step = noted
    replay = {"router_replay": True} if payload["replay"] else {}
    seen = []

    def add_fields(local: Any) -> Any:
        seen.append("routed_experts" in local)
        return local

    updates = list(
        train_on_rollouts(strategy, home, Gaps(), mini_batch_size=6, epochs=2, seed=5, add_fields=add_fields, **replay)
    )
    after = strategy.forward(distribute(home, plan), plan, ("log_probs", "routed_experts"))
    moved = (first["routed_experts"].sort(-1)[0] != after["routed_experts"].sort(-1)[0]).any(-1).float().mean()
    return {
        "gaps": [result.metrics["gap"] for _, result in updates],
        "losses": [result.loss for _, result in updates],
        "own": own,
        "steps": steps,
        "seen": seen,
        "moved": float(moved),
    }


def _run(replay: bool, plan: str = "train", layout: dict[str, Any] | None = None, ranks: int = 1) -> list[Any]:
    return run_ranks(ranks, HERE + "trained", {"replay": replay, "plan": plan, "layout": layout or {}})


def test_all_steps_of_a_rollout_have_the_experts_of_its_old_log_probs(report: Any) -> None:
    (replayed,), (free,) = _run(True), _run(False)
    assert replayed["gaps"][0] == free["gaps"][0] == 0, "the first step's plan and weights are those of the old pass"
    assert replayed["losses"][0] == free["losses"][0] and replayed["losses"][2:] != free["losses"][2:]
    assert len(replayed["steps"]) == 4 and free["steps"] == [] and replayed["seen"] == [False]
    for step in replayed["steps"]:
        assert len(step) == 6 and all(torch.equal(step[i], replayed["own"][i]) for i in step)
    assert replayed["moved"] > 0.01, "the learning rate is too small for this test"
    report(f"after four steps {replayed['moved']:.0%} of (token, layer) would have other experts")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "layout", "ranks"),
    [
        ("own", {}, 1),
        ("train", {"expert_model_parallel_size": 2}, 2),
        ("train", {"pipeline_model_parallel_size": 2}, 2),
    ],
)
def test_other_layouts_train_alike(plan: str, layout: dict[str, Any], ranks: int) -> None:
    (one,) = _run(True)
    for rank in _run(True, plan, layout, ranks):
        assert all(abs(a - b) < 1e-4 for a, b in zip(rank["losses"], one["losses"], strict=True))
        assert all(torch.equal(step[i], one["own"][i]) for step in rank["steps"] for i in step)
