"""Routers under freeze_moe_router: no gradient, no step, and the other gradients as without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.layouts import Layout
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.layouts

HERE = "tests.strategy.test_frozen_routers:"
EXPERTS = {"num_experts": 4, "router_topk": 2, "ffn_hidden_size": 24}
LAYOUTS = [
    Layout(),
    Layout(dp=2, ep=2, distopt=True),
    Layout(tp=2, sp=True),
    pytest.param(Layout(pp=2, vpp=2, recompute=True), marks=pytest.mark.slow),
    pytest.param(Layout(dp=2, distopt=True, dtype="bf16"), marks=pytest.mark.slow),
]


def strategy_of(layout: Layout, moe: dict[str, Any] | None = None, **megatron: Any) -> Any:
    """A strategy with weights by their global names."""
    from roll_batching.strategy import MegatronTrainStrategy
    from tests.support.models import ARCHITECTURE, fill, worker_config

    shape = {**ARCHITECTURE, "num_layers": 4, "moe": EXPERTS | (moe or {})}
    config = worker_config(
        "packed", 64, architecture=shape, megatron=layout.megatron() | megatron, dtype=layout.dtype,
        training={"learning_rate": 1e-2},
    )  # fmt: skip
    strategy = MegatronTrainStrategy(config)
    strategy.initialize()
    fill(strategy.chunks, 61, strategy.layout.tp_rank, strategy.layout.tp_size)
    strategy.optimizer.reload_model_params()
    return strategy


def steps(strategy: Any, first: int, last: int) -> list[float]:
    """Losses of steps first..last-1."""
    from tests.strategy.test_checkpoint import steps as all_steps

    return [loss for loss, _, _ in all_steps(strategy, first, last)]


def weights(strategy: Any) -> dict[str, torch.Tensor]:
    """Copies of this rank's weights by global name."""
    from roll_batching.modeling.head import gpt_of
    from tests.support.models import global_name

    gpts = [gpt_of(chunk) for chunk in strategy.chunks]
    return {global_name(gpt, n): p.detach().clone() for gpt in gpts for n, p in gpt.named_parameters()}


def gradients(strategy: Any) -> dict[str, torch.Tensor]:
    """Copies of this rank's gradients by global name, where a parameter has one."""
    from roll_batching.modeling.head import gpt_of
    from tests.support.models import global_name

    gpts = [gpt_of(chunk) for chunk in strategy.chunks]
    named = [(global_name(gpt, n), p) for gpt in gpts for n, p in gpt.named_parameters()]
    return {n: p.main_grad.clone() for n, p in named if hasattr(p, "main_grad")}


def frozen_and_not(layout: dict[str, Any]) -> dict[str, Any]:
    """Gradients of a first step, and names of the weights that three steps moved, with and without the key."""
    found: dict[str, Any] = {}
    for frozen in (False, True):
        strategy = strategy_of(Layout(**layout), freeze_moe_router=frozen)
        before = weights(strategy)
        steps(strategy, 0, 1)
        # Reduced gradients lie where each data-parallel rank owns them: its shard is the same with and without routers.
        found[f"gradients {frozen}"] = gradients(strategy)
        steps(strategy, 1, 3)
        strategy.gather_parameters()
        after = weights(strategy)
        found[f"moved {frozen}"] = {n for n in before if not torch.equal(before[n], after[n])}
        found[f"all {frozen}"] = set(before)
    return found


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_frozen_router_keeps_its_weights_to_the_bit(layout: Layout) -> None:
    for found in run_ranks(layout.ranks, HERE + "frozen_and_not", vars(layout)):
        assert found["moved False"] == found["all False"] == found["all True"]
        routers = {name for name in found["all True"] if ".router." in name}
        assert routers and found["moved True"] == found["all True"] - routers
        assert set(found["gradients True"]) == found["all True"] - routers
        if not layout.distopt:  # there the shards of a bucket without routers begin elsewhere
            for name, gradient in found["gradients True"].items():
                assert torch.equal(gradient, found["gradients False"][name]), name


def saved(case: tuple[str, dict[str, Any], bool]) -> Any:
    """Saved after two steps; the weights of routers, and losses of two more steps."""
    path, layout, resumed = case
    strategy = strategy_of(Layout(**layout), freeze_moe_router=True)
    if resumed:
        strategy.load(path)
    else:
        steps(strategy, 0, 2)
        strategy.save(path)
    routers = {name: tensor for name, tensor in weights(strategy).items() if ".router." in name}
    return routers, steps(strategy, 2, 4)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Layout(dp=2, ep=2, distopt=True), Layout()),
        pytest.param(Layout(), Layout(pp=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_checkpoint_of_frozen_routers_loads_in_another_layout(tmp_path: Any, first: Layout, second: Layout) -> None:
    routers, losses = run_ranks(first.ranks, HERE + "saved", (str(tmp_path / "state"), vars(first), False))[0]
    for found, again in run_ranks(second.ranks, HERE + "saved", (str(tmp_path / "state"), vars(second), True)):
        assert found and all(torch.equal(tensor, routers[name]) for name, tensor in found.items())
        assert all(abs(a - b) < 1e-4 * abs(b) for a, b in zip(again, losses, strict=True))


def resumed_with_the_other_setting(path: str) -> list[str]:
    """Errors of a job that trains its routers with a checkpoint of one that does not, and the other way round."""
    from roll_batching.errors import CheckpointError

    strategies = [strategy_of(Layout(), freeze_moe_router=frozen) for frozen in (False, True)]
    said = []
    for number, strategy in enumerate(strategies):
        steps(strategy, 0, 1)
        strategy.save(f"{path}-{number}")
    for number, strategy in enumerate(strategies):
        try:
            strategy.load(f"{path}-{1 - number}")
        except CheckpointError as error:
            said.append(str(error))
    return said


def test_a_checkpoint_resumes_with_the_same_setting_alone(tmp_path: Any) -> None:
    (said,) = run_ranks(1, HERE + "resumed_with_the_other_setting", str(tmp_path / "state"))
    assert len(said) == 2 and all("optimizer.state.exp_avg.decoder.layers.mlp.router.weight" in text for text in said)


def losses_and_biases(_: None) -> dict[str, Any]:
    """What is left of a frozen router: gradients of its auxiliary loss below it, and steps of its expert biases."""
    from roll_batching.modeling.experts import expert_biases
    from roll_batching.modeling.head import gpt_of

    found: dict[str, Any] = {}
    for weight in (0.0, 0.1):
        strategy = strategy_of(Layout(), {"aux_loss_coeff": weight}, freeze_moe_router=True)
        steps(strategy, 0, 1)
        found[f"loss {weight}"] = gradients(strategy)["embedding.word_embeddings.weight"]
    sigmoid = {"router_score_function": "sigmoid", "router_expert_bias": True}
    for rate in (None, 0.0, 1e-3):
        given = {} if rate is None else {"moe_router_bias_update_rate": rate}
        model = sigmoid | ({"router_bias_update_rate": 1e-2} if rate is not None else {})
        strategy = strategy_of(Layout(), model, freeze_moe_router=True, **given)
        steps(strategy, 0, 1)
        found[f"bias {rate}"] = max(float(b.abs().max()) for _, b in expert_biases(gpt_of(strategy.chunks[0])))
    return found


def test_losses_and_biases_of_frozen_routers_keep_their_own_keys() -> None:
    (found,) = run_ranks(1, HERE + "losses_and_biases", None)
    assert not torch.equal(found["loss 0.0"], found["loss 0.1"])
    assert found["bias None"] == found["bias 0.0"] == 0
    assert found["bias 0.001"] == pytest.approx(1e-3)
