"""`config.json` is translated as transformers reads it, in its old and its new spelling."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys

import pytest
import torch

from roll_batching.huggingface.config_json import translate
from roll_batching.huggingface.families import load_family, rules_of
from roll_batching.huggingface.fields import DELTA_NET_FIELDS
from roll_batching.huggingface.stored import ranges
from roll_batching.huggingface.tensors import Sizes, expected_tensors
from roll_batching.jobs.config import ConfigFileError, config_from_dict
from roll_batching.settings import ArchitectureConfig
from tests.huggingface import tiny
from tests.huggingface.published import PUBLISHED

pytestmark = pytest.mark.models

EXPECTED = {
    "Llama-2-7b": {"rotary_base": 10000.0, "kv_heads": 32, "head_dim": 128, "sliding_window": None},
    "Llama-3.2-1B": {"tie_word_embeddings": True, "head_dim": 64, "rotary_base": 500000.0},
    "Mistral-7B-v0.1": {"sliding_window": 4096, "kv_heads": 8},
    "Qwen2.5-7B": {"add_qkv_bias": True, "sliding_window": None, "vocab_size": 152064, "norm_epsilon": 1e-6},
    "Qwen3-30B-A3B": {"qk_layernorm": True, "head_dim": 128, "ffn_width": 6144},
    "Mixtral-8x7B-v0.1": {"ffn_width": 14336, "rotary_base": 1e6},
    "GLM-4.5-Air": {"add_qkv_bias": True, "qk_layernorm": False, "rotary_percent": 0.5, "head_dim": 128},
    "MiniMax-M2.7": {"qk_layernorm": "all_heads", "rotary_percent": 0.5, "head_dim": 128, "ffn_width": 1536},
    "DeepSeek-V3": {"head_dim": 192, "value_dim": 128, "kv_heads": 128},
    "Qwen3-Next-80B-A3B-Instruct": {
        "attention_output_gate": True,
        "zero_centered_norms": True,
        "rotary_percent": 0.25,
        "head_dim": 256,
        "qk_layernorm": True,
    },
    "gemma-3-1b-it": {
        "rotary_base": 1e6,
        "rotary_local_base": 1e4,
        "sliding_window": 512,
        "window_layers": ((1,) * 5 + (0,)) * 4 + (1, 1),
        "activation": "gelu_tanh",
        "tie_word_embeddings": True,
    },
    "gpt-oss-20b": {"attention_sinks": True, "sliding_window": 128, "window_layers": (1, 0) * 12, "swiglu_limit": 7.0},
    "Moonlight-16B-A3B": {"head_dim": 192, "rope_scaling": None, "norm_epsilon": 1e-5},
}
PARAMETERS = {
    "Llama-2-7b": 6_738_415_616,
    "Llama-3.2-1B": 1_235_814_400,
    "Mistral-7B-v0.1": 7_241_732_096,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Mixtral-8x7B-v0.1": 46_702_792_704,
    "GLM-4.5-Air": None,
    "MiniMax-M2.7": None,
    "DeepSeek-V3": None,
    "Moonlight-16B-A3B": None,
    "Qwen3-Next-80B-A3B-Instruct": None,
    "gemma-3-1b-it": 999_885_952,
    "gpt-oss-20b": None,
}
"""As their publishers count them; None: as transformers counts parameters and expert biases."""


def counted_by_transformers(config):
    from transformers import AutoConfig, AutoModelForCausalLM

    known = {key: value for key, value in config.items() if key not in ("transformers_version", "architectures")}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**known))
    biases = [value for name, value in model.named_buffers() if name.endswith("e_score_correction_bias")]
    return sum(value.numel() for value in (*model.parameters(), *biases))


def architecture_of(config, **switches):
    found = translate(config, **switches)
    assert found.problems == []
    return ArchitectureConfig.model_validate(found.architecture)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files(name, report):
    config = PUBLISHED[name]
    architecture = architecture_of(config)
    for key, value in EXPECTED[name].items():
        assert getattr(architecture, key) == value, key
    family = load_family(config["model_type"])
    tensors = expected_tensors(rules_of(family, architecture), Sizes.of(architecture))
    count = sum(math.prod(shape) for shape in tensors.values())
    assert count == (PARAMETERS[name] or counted_by_transformers(config))
    report(f"{name}: {len(tensors):,} tensors, {count:,} parameters")


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_new_spelling_means_the_same(name):
    """What transformers writes after it has read the old one, defaults of its class filled in."""
    from transformers import AutoConfig

    old = PUBLISHED[name]
    config = AutoConfig.for_model(**{key: value for key, value in old.items() if key != "transformers_version"})
    config.architectures = old["architectures"]
    new = json.loads(config.to_json_string(use_diff=False))
    assert "rope_theta" not in new and "rope_parameters" in new
    ours, theirs = architecture_of(old), architecture_of(new)
    assert ours.model_copy(update={"kv_channels": ours.head_dim}) == theirs.model_copy(
        update={"kv_channels": theirs.head_dim}
    )


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_field_that_is_not_there_means_what_transformers_says(name):
    from transformers import AutoConfig

    config = PUBLISHED[name]
    told_by_the_class = (
        "rope_theta",
        "tie_word_embeddings",
        "initializer_range",
        "use_sliding_window",
        "norm_topk_prob",
        "routed_scaling_factor",
        "n_group",
        "topk_group",
        "first_k_dense_replace",
        "n_shared_experts",
        "use_qk_norm",
        "attention_bias",
        "partial_rotary_factor",
        "rope_interleave",
        "rope_local_base_freq",
        "query_pre_attn_scalar",
        "sliding_window_pattern",
        "full_attention_interval",
        *DELTA_NET_FIELDS,
    )
    for field in (*told_by_the_class, "head_dim", "decoder_sparse_step", "mlp_only_layers"):
        if name == "Moonlight-16B-A3B" and field in ("n_group", "topk_group"):
            continue  # the class's groups of experts do not go with its six experts per token
        less = {key: value for key, value in config.items() if key not in (field, "transformers_version")}
        written = json.loads(AutoConfig.for_model(**less).to_json_string(use_diff=False))
        ours, theirs = architecture_of(less), architecture_of(written | {"architectures": None})
        ours, theirs = (one.model_copy(update={"kv_channels": one.head_dim}) for one in (ours, theirs))
        assert ours == theirs, field


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gpt_neox"}, "model_type 'gpt_neox' is not supported: the families are llama"),
        ({"model_type": "gemma2"}, "it caps the scores of attention and the logits by tanh"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "only LlamaForCausalLM"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu'"),
        ({"attention_bias": True}, "attention_bias: True"),
        ({"mlp_bias": True}, "mlp_bias: True"),
        ({"pretraining_tp": 2}, "pretraining_tp: 2"),
        ({"attention_dropout": 0.1}, "attention_dropout: 0.1"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: {'bits': 4}"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0}},
            "rope_scaling.original_max_position_embeddings is missing",
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta": 1}},
            "rope_scaling.beta has no effect with rope_type yarn",
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope_scaling.rope_type 'dynamic'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "rope_scaling.low_freq_factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "beta": 1}}, "rope_scaling.beta has no effect"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5"),
        (
            {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            "rope_scaling: {'rope_type': 'linear', 'factor': 2.0} contradicts rope_parameters",
        ),
        ({"num_key_value_heads": True}, "num_key_value_heads: True is not supported, it must be a number"),
        ({"rms_norm_eps": None}, "rms_norm_eps is missing"),
        ({"sliding_window": 512}, "sliding_window: 512 is an unknown field"),
        ({"num_experts": 8}, "num_experts: 8 is an unknown field"),
        ({"anything": "new"}, "anything: 'new' is an unknown field of model_type llama"),
    ],
)
def test_refused_by_name(changes, words, report):
    problems = translate(PUBLISHED["Llama-2-7b"] | changes).problems
    assert words in problems[0] and (len(problems) == 1 or "llama3" in str(changes))
    report("; ".join(problems))


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"output_router_logits": True}, "output_router_logits: true"),
        ({"num_experts_per_tok": 1}, "the router would not be trained"),
        ({"mlp_only_layers": list(range(48))}, "leave no mixture-of-experts layer"),
    ],
)
def test_refused_of_experts(changes, words):
    assert words in "; ".join(translate(PUBLISHED["Qwen3-30B-A3B"] | changes).problems)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("DeepSeek-V3", {"scoring_func": "softmax"}, "scoring_func: 'softmax' is not supported, only 'sigmoid'"),
        ("DeepSeek-V3", {"topk_method": "greedy"}, "topk_method: 'greedy' is not supported"),
        ("DeepSeek-V3", {"norm_topk_prob": False}, "norm_topk_prob: false"),
        ("DeepSeek-V3", {"topk_group": 2}, "Megatron-Core ranks groups by their best num_experts_per_tok / topk_group"),
        ("DeepSeek-V3", {"first_k_dense_replace": 61}, "leaves no mixture-of-experts layer"),
        ("DeepSeek-V3", {"kv_lora_rank": None}, "kv_lora_rank is missing"),
        ("DeepSeek-V3", {"head_dim": 128}, "head_dim: 128 is not supported"),
        ("DeepSeek-V3", {"qk_head_dim": 128}, "qk_head_dim: 128 is not qk_nope_head_dim + qk_rope_head_dim"),
        ("DeepSeek-V3", {"num_key_value_heads": 8}, "num_key_value_heads: 8 has no effect here"),
        ("DeepSeek-V3", {"rope_interleave": "yes"}, "rope_interleave: 'yes' must be true or false"),
        ("DeepSeek-V3", {"attention_bias": True}, "attention_bias: True is not supported"),
        ("DeepSeek-V3", {"quantization_config": {"fmt": "e4m3"}}, "quantization_config: {'fmt': 'e4m3'}"),
        ("gpt-oss-20b", {"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config: {'quant_method'"),
        ("gpt-oss-20b", {"layer_types": None}, "layer_types is missing"),
        ("gpt-oss-20b", {"swiglu_alpha": 1.5}, "swiglu_alpha: 1.5 is not supported, only 1.702"),
        ("gpt-oss-20b", {"swiglu_limit": "7"}, "swiglu_limit: '7' is not supported, it must be a number"),
        ("gpt-oss-20b", {"attention_bias": False}, "attention_bias: False is not supported, only True"),
        ("Qwen3-Next-80B-A3B-Instruct", {"linear_key_head_dim": None}, "linear_key_head_dim is missing"),
        ("Qwen3-Next-80B-A3B-Instruct", {"full_attention_interval": 1}, "full_attention_interval: 1 is not supported"),
        ("Qwen3-Next-80B-A3B-Instruct", {"layer_types": ["full_attention"] * 48}, "and both, for each of 48 layers"),
        ("Qwen3-Next-80B-A3B-Instruct", {"layer_types": "linear_attention"}, "and both, for each of 48 layers"),
        ("Qwen3-Next-80B-A3B-Instruct", {"use_sliding_window": True}, "use_sliding_window: true is not supported"),
        (
            "Qwen3-Next-80B-A3B-Instruct",
            {"shared_expert_intermediate_size": None},
            "shared_expert_intermediate_size is missing",
        ),
        ("Qwen3-30B-A3B", {"shared_expert_intermediate_size": 64}, "has no effect with model_type qwen3_moe"),
        ("gemma-3-1b-it", {"final_logit_softcapping": 30.0}, "final_logit_softcapping: 30.0 is not supported"),
        ("gemma-3-1b-it", {"use_bidirectional_attention": True}, "use_bidirectional_attention: True is not supported"),
        ("gemma-3-1b-it", {"hidden_activation": "gelu"}, "only 'gelu_pytorch_tanh'"),
        ("gemma-3-1b-it", {"query_pre_attn_scalar": None}, "query_pre_attn_scalar: None is not supported"),
        ("gemma-3-1b-it", {"sliding_window_pattern": 0}, "sliding_window_pattern: 0 is not supported"),
        ("gemma-3-1b-it", {"rope_parameters": {"rope_type": "default"}}, "must be an object of full_attention and"),
        (
            "gemma-3-1b-it",
            {"rope_parameters": {"full_attention": {"rope_theta": 5.0}}},
            "rope_parameters.full_attention contradicts {'rope_theta': 1000000}",
        ),
        (
            "gemma-3-1b-it",
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "only rope_theta of the default rope_type",
        ),
        ("MiniMax-M2.7", {"attn_type_list": [1, 0] * 31}, "attn_type_list must have 1 (full attention) for each of 62"),
        ("MiniMax-M2.7", {"rotary_dim": 256}, "rotary_dim: 256 is not supported, it must be a number of channels"),
        ("MiniMax-M2.7", {"rotary_dim": float("nan")}, "rotary_dim: nan is not supported"),
        ("MiniMax-M2.7", {"partial_rotary_factor": 0.25}, "rotary_dim: 64 contradicts partial_rotary_factor: 0.25"),
        ("MiniMax-M2.7", {"num_mtp_modules": "3"}, "num_mtp_modules: '3' is not supported, it must be a number"),
        ("MiniMax-M2.7", {"qk_norm_type": "per_head"}, "qk_norm_type: 'per_head' is not supported, only 'per_layer'"),
        ("MiniMax-M2.7", {"use_routing_bias": False}, "use_routing_bias: False is not supported"),
        ("MiniMax-M2.7", {"shared_intermediate_size": 512}, "shared_intermediate_size: 512 is not supported, only 0"),
        ("MiniMax-M2.7", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ("GLM-4.5-Air", {"use_qk_norm": "no"}, "use_qk_norm: 'no' is not supported, it must be true or false"),
        ("GLM-4.5-Air", {"n_shared_experts": 0}, "n_shared_experts: 0 is not supported"),
        ("GLM-4.5-Air", {"q_lora_rank": 8}, "q_lora_rank: 8 is an unknown field of model_type glm4_moe"),
        ("GLM-4.5-Air", {"num_nextn_predict_layers": "one"}, "num_nextn_predict_layers: 'one' is not supported"),
        ("GLM-4.5-Air", {"rope_parameters": {"partial_rotary_factor": 0.25}}, "is not supported beside"),
        ("GLM-4.5-Air", {"mlp_layer_types": ["sparse"]}, "mlp_layer_types must name dense or sparse"),
    ],
)
def test_refused_of_latent_attention_and_sigmoid_routing(name, changes, words):
    problems = translate(PUBLISHED[name] | changes).problems
    assert len(problems) == 1 and words in problems[0], problems


def test_the_factors_of_yarn():
    """Those of DeepSeek-V3's config.json cancel out for rotated channels, and scale attention."""
    architecture = architecture_of(PUBLISHED["DeepSeek-V3"])
    assert architecture.rope_scaling.rotated_factor == 1.0
    scaling = {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}
    qwen = architecture_of(PUBLISHED["Qwen2.5-7B"] | scaling).rope_scaling
    assert qwen.rotated_factor == pytest.approx(1.1386294361119891)
    without_factor = {"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 32768, "factor": None}}
    assert architecture_of(PUBLISHED["Qwen2.5-7B"] | without_factor).rope_scaling.factor == 4.0


def test_two_ropes():
    """Of Gemma: scaled in layers without a window, and of a base of its own in the others."""
    gemma = PUBLISHED["gemma-3-1b-it"]
    scaled = architecture_of(gemma | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}})
    assert (scaled.rope_scaling.type, scaled.rope_scaling.factor, scaled.rotary_local_base) == ("linear", 8.0, 1e4)
    without = {key: value for key, value in gemma.items() if not key.startswith("rope_")}
    newer = {"full_attention": {"rope_type": "linear", "factor": 8.0}, "sliding_attention": {"rope_theta": 5e3}}
    found = architecture_of(without | {"rope_parameters": newer})
    assert (found.rotary_base, found.rope_scaling.factor, found.rotary_local_base) == (1e6, 8.0, 5e3)
    assert architecture_of(without).rotary_local_base == 1e4
    full = architecture_of(gemma | {"layer_types": ["full_attention"] * 26})
    assert full.rotary_local_base is None and full.sliding_window is None
    short = architecture_of(gemma | {"max_position_embeddings": 512})  # windows change nothing, but RoPE does
    assert short.sliding_window == 512 and short.rotary_local_base == 1e4


def test_layers_of_experts():
    config = PUBLISHED["Qwen3-30B-A3B"] | {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    assert architecture_of(config).moe.layer_freq == (0, 1, 0, 0, 0, 1)
    assert architecture_of(config | {"norm_topk_prob": False}).moe.router_pre_softmax


def test_windows():
    qwen = PUBLISHED["Qwen2.5-7B"]
    sliding = {"use_sliding_window": True, "sliding_window": 4096}
    assert architecture_of(qwen | sliding).sliding_window is None  # of the layers from max_window_layers on: none
    assert architecture_of(qwen | sliding | {"max_window_layers": 20}).sliding_window == 4096
    kinds = ["full_attention"] * 28
    assert architecture_of(qwen | {"sliding_window": 4096, "layer_types": kinds}).sliding_window is None
    assert architecture_of(
        qwen | {"sliding_window": 4096, "layer_types": kinds[1:] + ["sliding_attention"]}
    ).sliding_window
    assert "layer_types must name" in "".join(translate(qwen | {"layer_types": ["linear_attention"] * 28}).problems)


def test_names_that_differ_in_numbers_are_said_together():
    names = [f"model.layers.{layer}.mlp.experts.{expert}.w1" for layer in range(3) for expert in range(8)]
    assert ranges(names) == ["model.layers.0-2.mlp.experts.0-7.w1"]
    assert ranges(names[1:9]) == names[1:9]
    assert ranges(["a.1.b", "a.3.b", "a.4.b", "c"]) == ["a.1,3-4.b", "c"]


@pytest.mark.bad_input
def test_a_value_of_the_wrong_kind_is_named(tmp_path):
    tiny.write_model(tmp_path, "llama3")
    tiny.edit_config(tmp_path, hidden_size="wide", tie_word_embeddings=3)
    with pytest.raises(ConfigFileError) as caught:
        config_from_dict({"pretrain": str(tmp_path)})
    (problem,) = caught.value.problems
    assert problem.path == ("pretrain",)
    assert "hidden_size: 'wide' is not possible" in problem.message and "tie_word_embeddings: 3" in problem.message
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigFileError, match=r"pretrain: .*config.json is not valid JSON"):
        config_from_dict({"pretrain": str(tmp_path)})


def test_a_name_is_found_in_the_cache(tmp_path):
    snapshot = tmp_path / "hub" / "models--Some--Model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(PUBLISHED["Qwen2.5-7B"]))
    refs = tmp_path / "hub" / "models--Some--Model" / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    code = (
        "from roll_batching.settings import ModelArgs; print(ModelArgs(model_name_or_path='Some/Model').architecture)"
    )
    environment = os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "hidden_size=3584" in done.stdout


def test_transformer_engines_names_stand_beside_the_local_ones():
    """Those of its layer spec without and with experts (`get_gpt_layer_with_transformer_engine_spec`)."""
    dense = rules_of(
        load_family("qwen3"), architecture_of(PUBLISHED["Qwen2.5-7B"] | {"model_type": "qwen3", "architectures": None})
    )
    fused = {rule.ours: rule.fused for rule in dense.values() if rule.fused and ".0." in rule.ours}
    layer = "decoder.layers.0"
    assert fused == {
        f"{layer}.input_layernorm.weight": f"{layer}.self_attention.linear_qkv.layer_norm_weight",
        f"{layer}.pre_mlp_layernorm.weight": f"{layer}.mlp.linear_fc1.layer_norm_weight",
    }
    experts = rules_of(load_family("mixtral"), architecture_of(PUBLISHED["Mixtral-8x7B-v0.1"]))
    assert (
        experts[f"{layer}.mlp.experts.local_experts.7.linear_fc1.weight"].fused
        == f"{layer}.mlp.experts.linear_fc1.weight7"
    )
    assert experts[f"{layer}.pre_mlp_layernorm.weight"].fused is None
