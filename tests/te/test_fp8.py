"""FP8 on the real TransformerEngine, as far as that goes without a GPU: what is built, entered, written and refused.

No product is computed in FP8: the kernels need a GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import meet, part, run_ranks
from tests.te.engine import needs_engine
from tests.te.test_engine import _written

pytestmark = [pytest.mark.te, needs_engine]

HERE = "tests.te.test_fp8:"
RECIPES = {"tensorwise": "Float8CurrentScaling", "blockwise": "Float8BlockScaling"}
LAYOUT = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "transformer_impl": "transformer_engine"}


def built(payload: tuple[str, str]) -> dict[str, Any]:
    """Of each recipe: the config, and per layer what Megatron's context of the layer enters."""
    from roll_batching.errors import RankError
    from roll_batching.modeling.head import gpt_of
    from roll_batching.samples import gather_lengths
    from roll_batching.strategy import MegatronTrainStrategy
    from roll_batching.strategy.sampling import GenerationSettings
    from tests.losses.steps import mine
    from tests.support.models import random_batch
    from tests.te.engine import as_if_on_an_h100, strategy_of

    directory, export = payload
    found: dict[str, Any] = {}
    for recipe in RECIPES:
        meet(recipe)
        keys = {"fp8": "e4m3", "fp8_recipe": recipe, "first_last_layers_bf16": True, "num_layers_at_end_in_bf16": 0}
        strategy = strategy_of(directory, LAYOUT | keys, cap=1024)
        config = gpt_of(strategy.chunks[0]).config
        local = mine(strategy, random_batch(3, 9, 40))
        plan = strategy.plan(gather_lengths(local))
        prompts = local.with_fields({}, {})
        try:
            strategy.generate(prompts, GenerationSettings(max_new_tokens=1, eos_token_id=0))
            said = ""
        except RankError as error:
            said = str(error)
        with as_if_on_an_h100():
            entered = [_entered(config, layer) for layer in range(config.num_layers)]
            own = MegatronTrainStrategy.from_parts(strategy.chunks, strategy.optimizer, strategy.batching)
        found[recipe] = {
            "config": (config.fp8, str(getattr(config.fp8_recipe, "value", config.fp8_recipe)), config.fp8_param),
            "entered": entered,
            "tokens": [mb.tokens for rank in plan.micro_batches for mb in rank],
            "own": own.settings.pack_multiple,
            "generate": said,
            "dtypes": sorted({str(p.dtype) for chunk in strategy.chunks for p in chunk.parameters()}),
            "kinds": _marked(strategy.chunks[0]),
            "layers": config.num_layers,
        }
        if recipe == "blockwise":
            strategy.export(export)
        del strategy, own
        part()
    return found


def _marked(chunk: Any) -> list[str]:
    return sorted({type(module).__name__ for module in chunk.modules() if hasattr(module, "is_first_microbatch")})


def _entered(config: Any, layer: int) -> str | None:
    """The recipe that a layer's context sets; None outside FP8."""
    from megatron.core.fp8_utils import get_fp8_context
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    with get_fp8_context(config, layer):
        if not FP8GlobalStateManager.is_fp8_enabled():
            return None
        return type(FP8GlobalStateManager.get_fp8_recipe()).__name__


_EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
WIDE: dict[str, tuple[str, dict[str, Any]]] = {
    "attention": ("Qwen3", {"head_dim": 16, "intermediate_size": 64}),
    "latent": (
        "DeepseekV3",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 32,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 16,
            "v_head_dim": 16,
            "intermediate_size": 64,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "num_mtp_layers": 0,
            **_EXPERTS,
        },
    ),
    "delta": (
        "Qwen3Next",
        {
            "head_dim": 16,
            "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 16,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "num_experts": 4,
            "shared_expert_intermediate_size": 32,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
            **_EXPERTS,
        },
    ),
}
"""Models whose shards on two ranks have sides that are multiples of 16."""


@pytest.mark.parametrize("name", WIDE)
def test_layers_enter_the_recipe_and_packs_are_aligned(name: str, tmp_path: Path) -> None:
    from tests.huggingface.test_export import check_equal

    source, export = _written(tmp_path, name, WIDE[name]), tmp_path / "exported"
    for found in run_ranks(2, HERE + "built", (str(source), str(export)), timeout=900):
        for recipe, multiple in (("tensorwise", 16), ("blockwise", 128)):
            one = found[recipe]
            assert one["config"] == ("e4m3", recipe, False)
            assert one["entered"] == [None, *[RECIPES[recipe]] * (one["layers"] - 1)]
            assert all(tokens % (2 * multiple) == 0 for tokens in one["tokens"])
            assert one["own"] == multiple
            assert "generate is not supported in FP8" in one["generate"]
            assert one["dtypes"] == ["torch.bfloat16"]
            # Megatron's schedule marks the first micro-batch of a step on these, which then copy their weights anew.
            column = "TELayerNormColumnParallelLinear" if name == "attention" else "TEColumnParallelLinear"
            assert {column, "TERowParallelLinear"} <= set(one["kinds"])
    check_equal(export, source)


def alignment(_: None) -> dict[str, list[int]]:
    """By recipe, the multiples of tokens up to 256 that TransformerEngine itself takes."""
    import torch
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
    from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer
    from transformer_engine.pytorch.utils import assert_dim_for_fp8_exec

    from roll_batching.settings.fp8 import TOKEN_MULTIPLES

    e4m3 = tex.DType.kFloat8E4M3
    block = Float8BlockQuantizer(e4m3, rowwise=True, columnwise=True)
    micro = MXFP8Quantizer(e4m3)

    def products(rows: int) -> bool:
        # The gradient of a weight contracts over the rows: they are the last dimension there.
        try:
            assert_dim_for_fp8_exec(torch.empty(rows, 256), torch.empty(256, rows))
        except (AssertionError, ValueError):
            return False
        return True

    takes = {
        "tensorwise": products,
        "mxfp8": lambda rows: products(rows) and micro.is_quantizable(torch.empty(rows, 256)),
        "blockwise": lambda rows: products(rows) and block.is_quantizable(torch.empty(rows, 256)),
    }
    assert takes.keys() == TOKEN_MULTIPLES.keys()
    return {recipe: [rows for rows in range(1, 257) if take(rows)] for recipe, take in takes.items()}


def test_the_multiples_are_those_that_transformer_engine_takes() -> None:
    from roll_batching.settings.fp8 import TOKEN_MULTIPLES

    found = run_ranks(1, HERE + "alignment", timeout=300)[0]
    for recipe, multiple in TOKEN_MULTIPLES.items():
        assert found[recipe] == list(range(multiple, 257, multiple)), recipe


def on_the_cpu(directory: str) -> str:
    """What a strategy in FP8 says on the CPU, as it is."""
    from roll_batching.errors import LayoutError, RankError
    from roll_batching.strategy import MegatronTrainStrategy
    from tests.te.engine import role

    keys = {"fp8": "e4m3", "fp8_recipe": "tensorwise", "transformer_impl": "transformer_engine"}
    try:
        MegatronTrainStrategy(role(directory, keys)).initialize()
    except (LayoutError, RankError) as error:
        return str(error)
    return ""


def test_on_the_cpu_fp8_is_refused_by_name(tmp_path: Path) -> None:
    (said,) = run_ranks(1, HERE + "on_the_cpu", str(_written(tmp_path, "llama2")), timeout=300)
    assert "fp8 computes on CUDA, not on cpu: leave it out" in said
