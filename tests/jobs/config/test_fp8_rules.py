"""FP8 keys: what they need, exclude and belong to, refused before a model is made; and which roles take them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roll_batching.jobs.config import ConfigFileError, config_from_dict, load_config
from roll_batching.settings.fp8 import device_problems
from tests.jobs.config.jobs import BASE, MODEL, changed

pytestmark = pytest.mark.config

LAYOUT = "actor_train.strategy_args.strategy_config"
ARCHITECTURE = "actor_train.model_args.architecture"
FP8: dict[str, Any] = {
    f"{LAYOUT}.fp8": "e4m3",
    f"{LAYOUT}.fp8_recipe": "blockwise",
    f"{LAYOUT}.transformer_impl": "transformer_engine",
}
ENDS = {f"{LAYOUT}.first_last_layers_bf16": True}


def key(name: str) -> str:
    return f"{LAYOUT}.{name}"


LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_head_dim": 16, "qk_pos_emb_head_dim": 16, "v_head_dim": 16}
DELTA = {
    "layers": [1, 1, 1, 0], "num_key_heads": 4, "num_value_heads": 8, "key_head_dim": 16, "value_head_dim": 16,
}  # fmt: skip
BROKEN: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "delayed scaling": ({key("fp8_recipe"): "delayed"}, {key("fp8_recipe"): "delayed is not supported: it scales by"}),
    "no recipe": ({key("fp8_recipe"): None}, {key("fp8_recipe"): "is missing: fp8 needs it; set tensorwise"}),
    "an unknown recipe": ({key("fp8_recipe"): "rowwise"}, {key("fp8_recipe"): "'rowwise'"}),
    "an unknown format": ({key("fp8"): "e5m2"}, {key("fp8"): "'e5m2'", key("fp8_recipe"): "is read with fp8"}),
    "a format that is a number": ({key("fp8"): 8}, {key("fp8"): "8", key("fp8_recipe"): "is read with fp8"}),
    "a recipe alone": ({key("fp8"): None}, {key("fp8_recipe"): "is read with fp8: e4m3 or hybrid only"}),
    "layers in bf16 of a model in bf16": (
        {key("fp8"): None, key("fp8_recipe"): None} | ENDS,
        {key("first_last_layers_bf16"): "is read with fp8"},
    ),
    "numbers of layers that nobody reads": (
        {key("num_layers_at_end_in_bf16"): 2},
        {key("num_layers_at_end_in_bf16"): "is read with first_last_layers_bf16: true only"},
    ),
    "more layers than a stage has": (
        ENDS | {key("num_layers_at_start_in_bf16"): 3, key("pipeline_model_parallel_size"): 2},
        {
            key("num_layers_at_start_in_bf16"): "is 3, above the 2 layers of a pipeline stage (4 layers, PP 2)",
            key("first_last_layers_bf16"): "leaves none of 4 layers in FP8 (3 + 1 in bf16)",
        },
    ),
    "NaN layers": (
        ENDS | {key("num_layers_at_start_in_bf16"): float("nan")},
        {key("num_layers_at_start_in_bf16"): "nan"},
    ),
    "no layer in FP8": (
        ENDS | {key("num_layers_at_start_in_bf16"): 2, key("num_layers_at_end_in_bf16"): 2},
        {key("first_last_layers_bf16"): "leaves none of 4 layers in FP8"},
    ),
    "local layers": (
        {key("transformer_impl"): "local"},
        {key("fp8"): "needs transformer_impl: transformer_engine, which is local"},
    ),
    "weights in fp32": ({"actor_train.model_args.dtype": "fp32"}, {"actor_train.model_args.dtype": "is fp32"}),
    "adapters": (
        {"actor_train.model_args.lora_target": "q_proj"},
        {
            key("fp8"): "is not supported with lora_target",
            "actor_train.model_args.lora_target": "transformer_impl: transformer_engine",
        },
    ),
    "a context-parallel size per pack": (
        {key("context_parallel_size"): "auto"},
        {key("fp8"): "needs one context-parallel size", key("context_parallel_size"): "auto needs transformer_impl"},
    ),
    "the precision-aware optimizer": (
        {key("use_precision_aware_optimizer"): True, key("use_distributed_optimizer"): True},
        {key("use_precision_aware_optimizer"): "fp8 is not supported with use_precision_aware_optimizer"},
    ),
    "latents whose shards are not multiples of 16": (
        {
            ARCHITECTURE: {**MODEL, "num_query_groups": 4, "multi_latent_attention": {**LATENT, "kv_lora_rank": 56}},
            key("tensor_model_parallel_size"): 2,
        },
        {key("fp8_recipe"): "multiples of 16, and kv_lora_rank + qk_pos_emb_head_dim is 36 on a rank"},
    ),
    "gated delta nets whose shards are not multiples of 16": (
        {ARCHITECTURE: {**MODEL, "gated_delta_net": {**DELTA, "num_value_heads": 4}}},
        {key("fp8_recipe"): "multiples of 16, and the width of gated delta nets' inputs is 264 on a rank"},
    ),
    "attention sinks": (
        {ARCHITECTURE: {**MODEL, "attention_sinks": True}},
        {key("fp8"): "is not supported with attention sinks"},
    ),
    "shards of weights that are not multiples of 16": (
        {key("tensor_model_parallel_size"): 2, f"{ARCHITECTURE}.ffn_hidden_size": 48},
        {key("fp8_recipe"): "multiples of 16, and ffn_hidden_size is 24 on a rank"},
    ),
    "weights in FP8": ({key("fp8_param"): True}, {key("fp8_param"): "weights are kept in bf16"}),
    "a misspelt key": ({key("fp8_recipes"): "blockwise"}, {key("fp8_recipes"): "did you mean 'fp8_recipe'?"}),
    "a reference in fp32": (
        {"reference.model_args.dtype": "fp32"},
        {"reference.model_args.dtype": "is fp32, and strategy_config.fp8 needs weights in bf16"},
    ),
}


@pytest.mark.bad_input
@pytest.mark.parametrize("name", BROKEN)
def test_what_fp8_needs_and_excludes(name: str, report: Any) -> None:
    changes, expected = BROKEN[name]
    with pytest.raises(ConfigFileError) as caught:
        config_from_dict(changed(FP8 | changes))
    found = {".".join(map(str, problem.path)): problem.message for problem in caught.value.problems}
    assert found.keys() == expected.keys(), found
    for path, words in expected.items():
        assert words in found[path], found[path]
        report(f"{name}: {path}: {found[path]}")


@pytest.mark.parametrize(
    "part", [{"num_query_groups": 4, "multi_latent_attention": LATENT}, {"gated_delta_net": DELTA}]
)
def test_latent_attention_and_gated_delta_nets_take_fp8(part: dict[str, Any]) -> None:
    config = config_from_dict(changed(FP8 | {ARCHITECTURE: {**MODEL, **part}}))
    assert config.actor_train.strategy_args.strategy_config.pack_multiple == 128


def test_roles_take_the_keys_of_actor_train_and_may_leave_them() -> None:
    config = config_from_dict(changed(FP8))
    assert config.reference is not None
    assert config.reference.strategy_args.strategy_config.pack_multiple == 128
    other = config_from_dict(changed(FP8 | {f"reference.{LAYOUT.split('.', 1)[1]}.fp8": None,
                                            f"reference.{LAYOUT.split('.', 1)[1]}.fp8_recipe": None}))  # fmt: skip
    assert other.reference is not None and other.reference.strategy_args.strategy_config.pack_multiple == 1
    assert config_from_dict(BASE).actor_train.strategy_args.strategy_config.pack_multiple == 1
    for harmless in ("fp8_margin", "fp8_amax_history_len", "moe_router_padding_for_fp8"):
        assert config_from_dict(changed(FP8 | {key(harmless): 0})).notices
    assert config_from_dict(changed(FP8 | {key("fp8_param"): False, key("fp8_param_gather"): False}))


@pytest.mark.bad_input
def test_a_model_in_fp8_does_not_sample() -> None:
    demo = Path(__file__).parents[3] / "configs" / "demo_grpo.yaml"
    settings = FP8 | {"actor_train.model_args.dtype": "bf16", key("fp8_recipe"): "tensorwise"}
    changes = [f"{path}={value}" for path, value in settings.items()]

    def said(*more: str) -> str:
        try:
            load_config(demo, [*changes, *more]).check_runnable()
        except ConfigFileError as error:
            return str(error)
        return ""

    assert "a model does not sample in FP8; set actor_infer.strategy_args.strategy_name to sglang" in said()
    said_of_async = said("async_generation_ratio=1")
    assert "a model does not sample in FP8" in said_of_async and "held-out" not in said_of_async
    assert said("max_steps=0") == ""


def test_devices_and_cuda_by_recipe() -> None:
    assert device_problems("tensorwise", (9, 0), "12.6") == device_problems("blockwise", (9, 0), "13.0") == []
    assert device_problems("mxfp8", (10, 0), "13.0") == []
    (text,) = device_problems("mxfp8", (9, 0), "13.0")
    assert "needs compute capability 10.0 (Blackwell) or later, this GPU has 9.0" in text
    assert text.endswith("set fp8_recipe: tensorwise or blockwise")
    (text,) = device_problems("tensorwise", (8, 0), "13.0")
    assert "this GPU has 8.0: leave fp8 out" in text
    (text,) = device_problems("blockwise", (9, 0), "12.8")
    assert "needs CUDA 12.9 or later, this torch is built for 12.8" in text
    assert "12.x" in device_problems("mxfp8", (12, 0), "13.0")[0]
