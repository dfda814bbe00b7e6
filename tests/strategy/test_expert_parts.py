"""A caller's mixture of experts: what routers count and balance is real tokens; what cannot work is refused by name."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import pytest
import torch

from tests.support.ranks import run_ranks

pytestmark = pytest.mark.layouts

HERE = "tests.strategy.test_expert_parts:"
TOPK = 2


def _experts(**options: Any) -> dict[str, Any]:
    fields = {"num_moe_experts": 4, "moe_router_topk": TOPK, "moe_ffn_hidden_size": 24}
    return fields | {"moe_router_load_balancing_type": "none"} | options


def counted(sizes: dict[str, int]) -> dict[str, list[tuple[int, torch.Tensor, torch.Tensor]]]:
    """By mode, for each layer of this rank: its number, tokens counted by expert, expert bias after the step."""
    from megatron.core.distributed import finalize_model_grads

    from roll_batching.losses import SFTLoss
    from roll_batching.modeling.head import gpt_of
    from roll_batching.samples import gather_lengths
    from roll_batching.strategy import MegatronTrainStrategy
    from tests.strategy.test_from_parts import _batching, _start
    from tests.support.models import random_batch
    from tests.support.own_model import build

    _start(**sizes)
    found = {}
    for mode in ("packed", "padded"):
        options = _experts(
            moe_router_enable_expert_bias=True,
            moe_router_score_function="sigmoid",
            moe_z_loss_coeff=1e-3,
            sequence_parallel=sizes.get("tp", 1) > 1,
        )
        parts = build("packed", layers=4, rotate="core", **options)
        strategy = MegatronTrainStrategy.from_parts(*parts, _batching(mode), vocab_size=61)
        layers = [layer for chunk in strategy.chunks for layer in gpt_of(chunk).decoder.layers]
        counts: list[torch.Tensor] = []

        def finalize(*args: Any, layers: Any = layers, counts: Any = counts, **kwargs: Any) -> None:
            counts += [layer.mlp.router.local_tokens_per_expert.clone() for layer in layers]
            finalize_model_grads(*args, **kwargs)

        strategy.chunks[0].config.finalize_model_grads_func = finalize
        batch = random_batch(17, 9, 40)
        plan = strategy.plan(gather_lengths(batch))
        strategy.forward_backward(batch, plan, SFTLoss())
        assert "_apply_expert_bias" not in vars(layers[0].mlp.router)
        biases = [layer.mlp.router.expert_bias for layer in layers]
        found[mode] = [(x.layer_number, n, b.clone()) for x, n, b in zip(layers, counts, biases, strict=True)]
    return found


@pytest.mark.slow
def test_an_expert_bias_counts_real_tokens_alone_on_every_stage() -> None:
    from tests.support.models import random_batch

    (one,) = run_ranks(1, HERE + "counted", {})
    several = run_ranks(4, HERE + "counted", {"tp": 2, "pp": 2})
    real = random_batch(17, 9, 40).num_tokens
    for mode in ("packed", "padded"):
        bias = {number: b for number, _, b in one[mode]}
        for number, expected, _ in one[mode]:
            assert int(expected.sum()) == real * TOPK
            parts = [(n, b) for rank in several for at, n, b in rank[mode] if at == number]
            assert len(parts) == 2
            assert torch.equal(sum(n for n, _ in parts), expected)
            assert all(torch.equal(b, bias[number]) for _, b in parts)


def biases_after(_: None) -> dict[str, Any]:
    """How far expert biases are from 0, and tokens still counted, after steps made, skipped and failed."""
    from roll_batching.errors import RollBatchingError
    from roll_batching.losses import SFTLoss
    from roll_batching.modeling.head import gpt_of
    from roll_batching.samples import gather_lengths
    from roll_batching.strategy import MegatronTrainStrategy
    from tests.strategy.test_from_parts import _batching, _start
    from tests.support.models import random_batch
    from tests.support.own_model import build

    _start()
    batch, found = random_batch(17, 9, 40), {}
    for case in ("made", "skipped", "failed", "failed, own optimizer"):
        options = _experts(moe_router_enable_expert_bias=True, moe_router_score_function="sigmoid")
        strategy = MegatronTrainStrategy.from_parts(*build("packed", rotate="core", **options), _batching("packed"))
        plan = strategy.plan(gather_lengths(batch))
        router = gpt_of(strategy.chunks[0]).decoder.layers[0].mlp.router
        if case.startswith("failed"):
            gpt_of(strategy.chunks[0]).output_layer.weight.data.fill_(float("nan"))
        if case == "skipped":
            router.weight.register_hook(lambda gradient: gradient * float("inf"))
        try:
            if case.endswith("own optimizer"):
                strategy.forward_backward(batch, plan, SFTLoss())
            else:
                assert strategy.train_step(batch, plan, SFTLoss()).skipped == (case == "skipped")
        except RollBatchingError as error:
            assert case.startswith("failed"), error
        else:
            assert not case.startswith("failed")
        found[case] = float(router.expert_bias.abs().sum()), float(router.local_tokens_per_expert.sum())
    return found


def test_expert_biases_move_in_steps_that_are_made_alone() -> None:
    found = run_ranks(1, HERE + "biases_after")[0]
    assert found.pop("made")[0] > 0
    assert set(found.values()) == {(0.0, 0.0)}


def problems(_: None) -> dict[str, str]:
    from roll_batching.errors import LayoutError
    from roll_batching.strategy import MegatronTrainStrategy
    from tests.strategy.test_from_parts import _batching, _start
    from tests.support.own_model import build

    _start()

    def said(mode: str = "packed", rows_form: bool = False, **changes: Any) -> str:
        parts = build("stock" if rows_form else "packed", **({} if rows_form else _experts()))
        for name, value in changes.items():
            setattr(parts[0][0].config, name, value)
        try:
            MegatronTrainStrategy.from_parts(*parts, _batching(mode), rows_form=rows_form)
        except LayoutError as error:
            return str(error)
        return "nothing"

    return {
        "fine": said(),
        "all-gather": said(moe_token_dispatcher_type="allgather"),
        "no sequence parallelism": said(tensor_model_parallel_size=2),
        "overlapped experts": said(overlap_moe_expert_parallel_comm=True),
        "quantiles": said(moe_router_load_balancing_type="quantile_balancing"),
        "global loss": said(moe_router_load_balancing_type="global_aux_loss"),
        "loss of sequences": said(moe_router_load_balancing_type=["aux_loss", "seq_aux_loss"]),
        "loss of sequences in rows": said("padded", True, moe_router_load_balancing_type="seq_aux_loss"),
        "fused router": said(moe_router_fusion=True),
        "some layers": said(recompute_granularity="full", recompute_method="block", recompute_num_layers=1),
        "whole layers": said(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
        "norms": said(recompute_granularity="selective", recompute_modules=["core_attn", "layernorm"]),
        "activations": said(recompute_granularity="selective", recompute_modules=["moe_act"]),
        "attention": said(recompute_granularity="selective", recompute_modules=["core_attn"]),
    }


SAYS = {
    "all-gather": "set it to 'alltoall' or 'flex'",
    "no sequence parallelism": "only with sequence_parallel=True",
    "overlapped experts": "overlap_moe_expert_parallel_comm needs",
    "quantiles": "take no padding mask",
    "global loss": "use 'aux_loss'",
    "loss of sequences": "as if it were one sequence",
    "fused router": "moe_router_fusion is a kernel of TransformerEngine",
    "norms": "recompute_modules: ['layernorm'] needs TransformerEngine",
    "activations": "recompute_modules: ['moe_act'] needs TransformerEngine",
}


def test_what_experts_cannot_do_is_said_at_construction() -> None:
    said = run_ranks(1, HERE + "problems")[0]
    assert {said.pop(x) for x in ("fine", "loss of sequences in rows", "whole layers", "attention")} == {"nothing"}
    some_layers = said.pop("some layers")
    if tuple(map(int, version("megatron-core").split(".")[:2])) < (0, 18):
        assert "recompute_method='block' passes no padding mask" in some_layers
    else:
        assert some_layers == "nothing"
    assert set(said) == set(SAYS)
    for name, part in SAYS.items():
        assert part in said[name], (name, said[name])


def mixtures(_: None) -> list[tuple[int, bool]]:
    """For each layer of this rank: its number and whether it is a mixture, where every second one is."""
    from roll_batching.modeling.head import gpt_of
    from roll_batching.strategy import MegatronInferStrategy
    from tests.support.models import ARCHITECTURE, worker_config

    shape = ARCHITECTURE | {"num_layers": 8, "moe": {"num_experts": 4, "layer_freq": 2, "ffn_hidden_size": 24}}
    megatron = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    strategy = MegatronInferStrategy(worker_config("packed", 64, architecture=shape, megatron=megatron))
    strategy.initialize()
    layers = [layer for chunk in strategy.chunks for layer in gpt_of(chunk).decoder.layers]
    return [(layer.layer_number, hasattr(layer.mlp, "router")) for layer in layers]


def test_layer_freq_says_which_layers_of_the_whole_model_are_mixtures() -> None:
    found = sorted(layer for rank in run_ranks(2, HERE + "mixtures") for layer in rank)
    assert found == [(number, number % 2 == 1) for number in range(1, 9)]
