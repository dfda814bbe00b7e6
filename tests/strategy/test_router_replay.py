"""Router replay: any experts, in every layout and mode, give the gradients of Megatron's own replay on one rank."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from tests.support.exact import DTYPE, EXACT, OF_ROUTERS, dtype_for, limit_of
from tests.support.layouts import Layout
from tests.support.models import ARCHITECTURE, MODES
from tests.support.ranks import meet, part, run_ranks

pytestmark = pytest.mark.layouts

HERE = "tests.strategy.test_router_replay:"
LAYERS = 4
ROUTERS: dict[str, dict[str, Any]] = {
    "softmax": {"num_experts": 4, "router_topk": 2, "ffn_hidden_size": 24},
    "before the softmax": {
        "num_experts": 4, "router_topk": 2, "ffn_hidden_size": 24, "router_pre_softmax": True,
    },
    "sigmoid, bias and groups": {
        "num_experts": 8, "router_topk": 4, "ffn_hidden_size": 24, "router_score_function": "sigmoid",
        "router_expert_bias": True, "router_num_groups": 4, "router_group_topk": 2, "router_scaling_factor": 1.5,
    },
}  # fmt: skip
CORE = [Layout(), Layout(dp=2, ep=2), Layout(pp=2, vpp=2, recompute=True), Layout(tp=2, sp=True)]
MORE = [
    Layout(recompute=True),
    Layout(cp=2, ep=2),
    Layout(dp=2, distopt=True, recompute=True),
    Layout(pp=2, dp=2, ep=2, recompute=True),
    Layout(tp=2, sp=True, pp=2),
    Layout(tp=2, sp=True, cp=2, ep=2, recompute=True),
    Layout(pp=2, vpp=2, cp=2, ep=2),
    Layout(pp=4, recompute=True),
    Layout(pp=2, recompute_experts=True),
]


def batch_of(router: str) -> Any:
    """Samples of a PPO step with random experts: -1 for one of five tokens, valid ones for the others."""
    from roll_batching.samples.fields import EXPERTS_SPEC
    from tests.support.models import random_batch

    moe = ROUTERS[router]
    batch = random_batch(40, 9, 40)
    g = torch.Generator().manual_seed(5)
    scores = torch.rand(batch.num_tokens, LAYERS, moe["num_experts"], generator=g)
    experts = scores.topk(moe["router_topk"]).indices.to(torch.int16)
    experts[torch.rand(batch.num_tokens, LAYERS, generator=g) < 0.2] = -1
    return batch.with_fields({"routed_experts": experts}, {"routed_experts": EXPERTS_SPEC})


def loss_of() -> Any:
    from roll_batching.losses import PolicyLoss

    return PolicyLoss(clip_low=0.2, clip_high=0.28, kl_coef=0.05, kl_bound=None, entropy_coef=0.02)


def write_reference(payload: tuple[str, str]) -> None:
    """Loss and gradients with the batch's experts, and the model's own experts: stock Megatron in fp64, its own replay.

    And the worst difference of these gradients in fp32.
    """
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from roll_batching.distributed.parallel_layout import make_layout, start_processes
    from roll_batching.planning import ParallelDims
    from tests.support.models import worst_difference

    path, router = payload
    make_layout(ParallelDims(), start_processes())
    model_parallel_cuda_manual_seed(0)
    loss, expected, own = _reference(router, torch.float64)
    rounding, _ = worst_difference(_reference(router, torch.float32)[1], expected)
    torch.save((loss, expected, own, rounding), path)


def _reference(router: str, dtype: torch.dtype) -> tuple[float, dict[str, torch.Tensor], torch.Tensor]:
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    from tests.support.reference import gradients, policy_loss, sequence_statistics, stock_model

    RouterReplay.global_router_replay_instances.clear()
    moe = ROUTERS[router]
    model = stock_model(
        {**ARCHITECTURE, "num_layers": LAYERS},
        num_moe_experts=moe["num_experts"],
        moe_router_topk=moe["router_topk"],
        moe_ffn_hidden_size=moe["ffn_hidden_size"],
        moe_router_pre_softmax=moe.get("router_pre_softmax", False),
        moe_router_score_function=moe.get("router_score_function", "softmax"),
        moe_router_enable_expert_bias=moe.get("router_expert_bias", False),
        moe_router_num_groups=moe.get("router_num_groups"),
        moe_router_group_topk=moe.get("router_group_topk"),
        moe_router_topk_scaling_factor=moe.get("router_scaling_factor"),
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        moe_enable_routing_replay=True,
        params_dtype=dtype,
    ).to(dtype)
    batch = batch_of(router)
    rows, given = batch.to_lists("input_ids"), batch.to_lists("routed_experts")
    RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
    own = []
    with torch.no_grad():
        for row in rows:
            sequence_statistics(model, row)
            own.append(torch.stack(RouterReplay.get_recorded_data(), 1))
    # Where a token has no experts of its own, the router's choice depends on those of the tokens and layers before it.
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    calls = iter(given)

    def replayed(*arguments: Any) -> Any:
        _replay_with_own(next(calls).long())
        return model(*arguments)

    loss = policy_loss(replayed, batch, clip=(0.2, 0.28), kl=0.05, entropy=0.02)
    return float(loss), gradients(model, loss), torch.cat(own)


def _replay_with_own(experts: torch.Tensor) -> None:
    """Megatron's replay of one sequence's `experts` [tokens, layers, top-k], with the router's own for -1."""
    from megatron.core.transformer.moe.router_replay import RouterReplay

    for layer, one in enumerate(RouterReplay.global_router_replay_instances):

        def choose(scores: Any, topk: int, groups: Any, group_topk: Any, default: Any, layer: int = layer) -> Any:
            _, own = default(scores, topk, num_groups=groups, group_topk=group_topk)
            chosen = torch.stack([a if a[0] >= 0 else b for a, b in zip(experts[:, layer], own, strict=True)])
            return scores.gather(1, chosen), chosen

        one.get_replay_topk = choose  # type: ignore[method-assign]


def compare(payload: tuple[str, str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """For each layout: differences from the reference by mode, and whether replay of own experts changes nothing."""

    path, router, layouts = payload
    found = []
    for index, layout in enumerate(layouts):
        meet(index)
        found.append(_compare_layout(path, router, Layout(**layout)))
        part()
    return found


def _compare_layout(path: str, router: str, layout: Layout) -> dict[str, Any]:
    from roll_batching.samples import collect, distribute, gather_lengths
    from roll_batching.strategy import MegatronTrainStrategy
    from tests.support.models import fill, whole_gradients, worker_config, worst_difference

    loss, expected, own, rounding = torch.load(path)
    dtype = dtype_for(distributed_optimizer=layout.distopt)

    def config(mode: str) -> Any:
        shape = {**ARCHITECTURE, "num_layers": LAYERS, "moe": ROUTERS[router]}
        return worker_config(mode, 64, architecture=shape, megatron=layout.megatron(), dtype=dtype)

    strategy = MegatronTrainStrategy(config("packed"))
    strategy.initialize()
    place = strategy.layout
    fill(strategy.chunks, 61, place.tp_rank, place.tp_size)
    whole = batch_of(router)
    local = whole.select(torch.arange(place.dp_rank, len(whole), place.dp_size))
    bare = local.without("routed_experts")
    found: dict[str, Any] = {"limit": limit_of(rounding) if layout.distopt else OF_ROUTERS}

    def gradients(batch: Any) -> tuple[float, Any]:
        plan = strategy.plan(gather_lengths(batch))
        strategy.zero_grad()
        loss, _ = strategy.forward_backward(distribute(batch, plan), plan, loss_of())
        return loss, whole_gradients(strategy.chunks, 61, place.tp_rank, layout.distopt)

    recorded = {}
    for mode in MODES:
        strategy.state = replace(strategy.state, batching=config(mode).batching())
        plan = strategy.plan(gather_lengths(bare), forward=True)
        results = strategy.forward(distribute(bare, plan), plan, ("log_probs", "routed_experts"))
        recorded[mode] = collect(results, plan, like=bare)["routed_experts"]
        here_loss, here = gradients(local)
        gap, name = worst_difference(here, expected)
        found[mode] = {"gradient": max(gap, here["spread"]), "parameter": name, "loss": abs(here_loss / loss - 1)}
    place_of = {int(sample): i for i, sample in enumerate(whole.ids)}
    rows = [place_of[int(sample)] for sample in local.ids]
    wanted = torch.cat([own[whole.offsets[i] : whole.offsets[i] + whole.lengths[i]] for i in rows])
    found["recorded"] = all(torch.equal(one.long(), wanted) for one in recorded.values())
    free_loss, free = gradients(bare)  # packed
    spec = {"routed_experts": local.schema["routed_experts"]}
    same_loss, same = gradients(bare.with_fields({"routed_experts": recorded["padded"]}, spec))
    found["same"] = free_loss == same_loss and all(torch.equal(free[n], same[n]) for n in free if n != "spread")
    found["changed"] = abs(here_loss - free_loss)
    routers = [m for chunk in strategy.chunks for m in chunk.modules() if hasattr(m, "router_replay")]
    found["left"] = [r.router_replay for r in routers if r.router_replay is not None]
    return found


def _run(router: str, layouts: list[Layout], report: Callable[[str], None]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/reference.pt"
        run_ranks(1, HERE + "write_reference", (path, router))
        for ranks in sorted({layout.ranks for layout in layouts}):
            same = [layout for layout in layouts if layout.ranks == ranks]
            every = run_ranks(ranks, HERE + "compare", (path, router, [asdict(x) for x in same]), timeout=600)
            for results in every:
                for layout, found in zip(same, results, strict=True):
                    for mode in MODES:
                        gap, parameter = found[mode]["gradient"], found[mode]["parameter"]
                        report(f"{router}, {layout}, {mode}: gradient {gap:.1e} ({parameter})")
                        gaps = found[mode]["gradient"], found[mode]["loss"]
                        assert max(gaps) < found["limit"], (layout, mode, found)
                    assert found["recorded"] and found["same"] and found["changed"] > 1e-3, (layout, found)
                    assert found["left"] == []


def test_replayed_experts_give_the_gradients_of_megatrons_own_replay(report: Callable[[str], None]) -> None:
    _run("softmax", CORE, report)


@pytest.mark.slow
@pytest.mark.parametrize("router", ["before the softmax", "sigmoid, bias and groups"])
def test_other_routers(router: str, report: Callable[[str], None]) -> None:
    _run(router, [Layout(), Layout(tp=2, sp=True, recompute=True), Layout(pp=2, vpp=2), Layout(cp=2)], report)


@pytest.mark.slow
def test_more_layouts(report: Callable[[str], None]) -> None:
    _run("softmax", MORE, report)


def in_some_layers(layout: dict[str, Any]) -> tuple[float, dict[int, torch.Tensor]]:
    """Loss with given experts, and own experts by sample, of a model with experts in its second and third layer."""
    from roll_batching.samples import distribute, gather_lengths
    from roll_batching.strategy import MegatronTrainStrategy
    from tests.support.models import fill, worker_config

    shape = {**ARCHITECTURE, "num_layers": LAYERS, "moe": ROUTERS["softmax"] | {"layer_freq": [0, 1, 1, 0]}}
    strategy = MegatronTrainStrategy(worker_config("packed", 64, architecture=shape, megatron=layout, dtype=DTYPE))
    strategy.initialize()
    fill(strategy.chunks, 61)
    batch = batch_of("softmax")
    field = {"routed_experts": batch["routed_experts"][:, 2:].contiguous()}
    batch = batch.with_fields(field, {"routed_experts": batch.schema["routed_experts"]})
    plan = strategy.plan(gather_lengths(batch))
    own = strategy.forward(batch.without("routed_experts"), plan, ("log_probs", "routed_experts"))
    loss = strategy.train_step(distribute(batch, plan), plan, loss_of()).loss
    return loss, {int(i): own.select_ids([int(i)])["routed_experts"] for i in own.ids}


@pytest.mark.slow
def test_layers_without_experts_have_no_column() -> None:
    ((loss, own),) = run_ranks(1, HERE + "in_some_layers", {})
    for other, experts in run_ranks(2, HERE + "in_some_layers", {"pipeline_model_parallel_size": 2}):
        assert abs(other - loss) < EXACT and experts.keys() == own.keys()
        assert all(one.shape[1:] == (2, 2) and torch.equal(one, own[i]) for i, one in experts.items())
