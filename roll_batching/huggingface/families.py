"""Supported model families: one mapping each, of `config.json` fields and checkpoint tensors to Megatron's.

To add a family: an entry of `FAMILIES` and a tiny model in `tests/huggingface/tiny.py`. A `Family` in a module of the
user's is named by `model_args.family`.

Every field of a family's `config.json` is in its entry or in one of the tables of `fields`; any other field is an error
that names it. Sources: each family's configuration and modeling files in transformers, and Megatron-Core's GPTModel.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from roll_batching.errors import ConfigError
from roll_batching.huggingface.family import Family
from roll_batching.huggingface.layer_rules import (
    DELTA_NET,
    DENSE,
    EMBEDDING,
    EXPERT_BIAS,
    FINAL_NORM,
    GATED_QKV,
    GATED_SHARED_EXPERT,
    HEAD,
    OUTPUT_BIAS,
    OUTPUT_PROJECTION,
    QK_NORM,
    QK_NORM_OF_ALL_HEADS,
    QKV,
    QKV_BIAS,
    SANDWICH_DENSE,
    SHARED_EXPERTS,
    SINKS,
    SPLIT_DELTA_NET,
    STACKED_MIXTURE,
    latent_attention,
    mixture,
)
from roll_batching.huggingface.tensors import TensorRule
from roll_batching.registry import load_dotted

_USUAL = {"rope_theta": 10000.0, "tie_word_embeddings": False, "initializer_range": 0.02}
_SIGMOID = {
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
}
_SIGMOID_MIXTURE = (*mixture("mlp", "gate_proj", "up_proj", "down_proj"), *SHARED_EXPERTS, *EXPERT_BIAS)
_DEEPSEEK = {
    **_SIGMOID,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "num_key_value_heads": None,
    "head_dim": None,
    "rope_interleave": True,
}
_DEEPSEEK_ALWAYS = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
_DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    defaults={**_USUAL, **_DEEPSEEK},
    always=_DEEPSEEK_ALWAYS,
    mixture=_SIGMOID_MIXTURE,
    latent_attention=True,
    sigmoid_routing=True,
)

_DELTA_NETS = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_QWEN3_5_FIELDS = {"attn_output_gate": True, "mamba_ssm_dtype": "float32"}
_QWEN3_5_USUAL = {**_USUAL, "head_dim": 256, "partial_rotary_factor": 0.25, **_DELTA_NETS}
_GATED = {"zero_centered_norms": True, "attention_output_gate": True}

_GEMMA3 = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    defaults={
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "rope_local_base_freq": 10000.0,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
    },
    always={
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "use_bidirectional_attention": False,
    },
    settings={
        "activation": "gelu_tanh",
        "sandwich_norms": True,
        "scaled_embedding": True,
        "zero_centered_norms": True,
    },
    numbers={"query_pre_attn_scalar": "query_pre_attn_scalar"},
    qk_layernorm=True,
    windows=True,
    local_rope=True,
)
QWEN3_5_TEXT = Family(
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    defaults=_QWEN3_5_USUAL,
    always=_QWEN3_5_FIELDS,
    settings=_GATED,
    qk_layernorm=True,
    partial_rope=True,
    image_axes=True,
    delta_net=SPLIT_DELTA_NET,
    untrained=("mtp.",),
)
QWEN3_5_MOE_TEXT = dataclasses.replace(
    QWEN3_5_TEXT,
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    defaults={
        **_QWEN3_5_USUAL,
        "intermediate_size": None,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 8,
        "num_experts": 256,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    mixture=(*mixture("mlp", "gate_proj", "up_proj", "down_proj"), *GATED_SHARED_EXPERT),
    shared_expert=True,
    normalised_experts=True,
)


FAMILIES: Mapping[str, Family] = {
    family.model_type: family
    for family in (
        Family(
            model_type="llama",
            architecture="LlamaForCausalLM",
            defaults={**_USUAL, "num_key_value_heads": None, "head_dim": None},
        ),
        Family(
            model_type="mistral",
            architecture="MistralForCausalLM",
            defaults={**_USUAL, "head_dim": None, "sliding_window": 4096},
            windows=True,
        ),
        Family(
            model_type="qwen2",
            architecture="Qwen2ForCausalLM",
            defaults={**_USUAL, "head_dim": None, "use_sliding_window": False},
            add_qkv_bias=True,
            windows=True,
        ),
        Family(
            model_type="qwen3",
            architecture="Qwen3ForCausalLM",
            defaults={**_USUAL, "head_dim": 128, "use_sliding_window": False},
            qk_layernorm=True,
            windows=True,
        ),
        Family(
            model_type="qwen3_moe",
            architecture="Qwen3MoeForCausalLM",
            defaults={
                **_USUAL,
                "head_dim": None,
                "use_sliding_window": False,
                "norm_topk_prob": False,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
            },
            qk_layernorm=True,
            windows=True,
            mixture=mixture("mlp", "gate_proj", "up_proj", "down_proj"),
        ),
        Family(
            model_type="mixtral",
            architecture="MixtralForCausalLM",
            defaults={**_USUAL, "rope_theta": 1e6, "head_dim": None, "sliding_window": None},
            windows=True,
            mixture=mixture("block_sparse_moe", "w1", "w3", "w2"),
            experts_share_ffn=True,
            normalised_experts=True,
        ),
        Family(
            model_type="glm4_moe",
            architecture="Glm4MoeForCausalLM",
            defaults={
                **_USUAL,
                **_SIGMOID,
                "head_dim": None,
                "attention_bias": False,
                "use_qk_norm": False,
                "partial_rotary_factor": 0.5,
            },
            switches={"attention_bias": "add_qkv_bias", "use_qk_norm": "qk_layernorm"},
            partial_rope=True,
            mixture=_SIGMOID_MIXTURE,
            sigmoid_routing=True,
        ),
        Family(
            model_type="gpt_oss",
            architecture="GptOssForCausalLM",
            defaults={**_USUAL, "rope_theta": 150000.0, "head_dim": 64, "sliding_window": 128, "swiglu_limit": 7.0},
            always={
                "attention_bias": True,
                "swiglu_alpha": 1.702,
            },
            settings={"add_bias_linear": True, "attention_sinks": True},
            numbers={"swiglu_limit": "swiglu_limit"},
            windows=True,
            needs_layer_types=True,
            mixture=STACKED_MIXTURE,
            experts_share_ffn=True,
            normalised_experts=True,
        ),
        Family(
            model_type="qwen3_next",
            architecture="Qwen3NextForCausalLM",
            defaults={
                **_USUAL,
                "head_dim": 256,
                "partial_rotary_factor": 0.25,
                "norm_topk_prob": True,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
                **_DELTA_NETS,
            },
            settings=_GATED,
            qk_layernorm=True,
            partial_rope=True,
            mixture=(*mixture("mlp", "gate_proj", "up_proj", "down_proj"), *GATED_SHARED_EXPERT),
            shared_expert=True,
            delta_net=DELTA_NET,
            untrained=("mtp.",),
        ),
        _GEMMA3,
        dataclasses.replace(
            _GEMMA3,
            model_type="gemma3",
            architecture="Gemma3ForConditionalGeneration",
            text_model="gemma3_text",
            prefixes=(("model.", "language_model.model."), ("lm_head.", "language_model.lm_head.")),
            untrained=("vision_tower.", "multi_modal_projector."),
        ),
        QWEN3_5_TEXT,
        QWEN3_5_MOE_TEXT,
        _DEEPSEEK_V3,
        dataclasses.replace(_DEEPSEEK_V3, model_type="kimi_k2"),
        dataclasses.replace(
            _DEEPSEEK_V3,
            model_type="glm4_moe_lite",
            architecture="Glm4MoeLiteForCausalLM",
            defaults={**_USUAL, **_DEEPSEEK, **_SIGMOID, "routed_scaling_factor": 1.8},
        ),
    )
}

_MODULES = {
    "family_layers": "minimax_m2 nemotron_h",
    "vision_families": "qwen2_5_vl qwen3_vl qwen3_vl_moe qwen3_5 qwen3_5_moe",
}
IN_MODULES = {
    name: f"{__package__}.{file}:{name.upper()}" for file, names in _MODULES.items() for name in names.split()
}
"""Families that few models need, in modules that are imported for them alone."""
MISSING: Mapping[str, str] = {
    "gemma2": "it caps the scores of attention and the logits by tanh, which no attention backend here computes",
    "glm4": "its projections of gate and input are one tensor, which no rule here cuts",
}
"""Reasons why a family needs more than a table."""


def load_family(model_type: object, own: str | None = None) -> Family:
    """The family of a `model_type`: a supported one, or `own`, the dotted path `package.module:NAME` of a `Family`.

    Raises `ConfigError` for an unsupported `model_type`, and for an `own` that cannot be imported, is no `Family` or
    has another `model_type`.
    """
    if own is None and str(model_type) in FAMILIES:
        return FAMILIES[str(model_type)]
    if (own := own or IN_MODULES.get(str(model_type))) is None:
        if str(model_type) in MISSING:
            raise ConfigError(f"model_type {model_type!r} is not supported: {MISSING[str(model_type)]}")
        names = ", ".join((*FAMILIES, *IN_MODULES))
        raise ConfigError(
            f"model_type {model_type!r} is not supported: the families are {names}. For another one, "
            "write its Family and name it in model_args.family as package.module:NAME"
        )
    family = load_dotted("model family", own)
    if not isinstance(family, Family):
        raise ConfigError(f"model_args.family {own!r} is a {type(family).__name__}: name a huggingface.families.Family")
    if family.model_type != model_type:
        raise ConfigError(f"model_args.family {own!r} is for {family.model_type!r}; the model_type is {model_type!r}")
    return family


def rules_of(family: Family, architecture: Any) -> dict[str, TensorRule]:
    """The rule of every parameter of a whole model, by the parameter's name in Megatron's local layer spec.

    `architecture` is an `ArchitectureConfig`. With tied embeddings the output layer is filled from the embedding's
    tensor.
    """
    head = HEAD
    if architecture.tie_word_embeddings:
        head = TensorRule(HEAD.ours, HEAD.join, EMBEDDING.theirs)
    bias = QKV_BIAS if architecture.add_qkv_bias or architecture.add_bias_linear else ()
    norm = {False: (), True: QK_NORM, "all_heads": QK_NORM_OF_ALL_HEADS}[architecture.qk_layernorm]
    attention = (*QKV, *bias, *norm, *(SINKS if architecture.attention_sinks else ()))
    output = OUTPUT_BIAS if architecture.add_bias_linear else ()
    if architecture.multi_latent_attention is not None:
        attention = latent_attention(architecture.multi_latent_attention.q_lora_rank is not None)
    if architecture.attention_output_gate:
        attention = (*GATED_QKV, *norm)
    rules, delta = [EMBEDDING], architecture.gated_delta_net
    for layer in range(architecture.num_layers):
        if architecture.hybrid is not None:
            from roll_batching.huggingface.family_layers import hybrid_layer  # few models have such layers

            rules += hybrid_layer(family, architecture, layer)
            continue
        with_attention = (*attention, *OUTPUT_PROJECTION, *output)
        is_delta = delta is not None and delta.layers[layer]
        rules += [rule.at(layer) for rule in (family.delta_net if is_delta else with_attention)]
        if architecture.moe is None or not architecture.moe.is_mixture(layer):
            rules += [rule.at(layer) for rule in (SANDWICH_DENSE if architecture.sandwich_norms else DENSE)]
            continue
        for rule in family.mixture:
            experts = range(architecture.moe.num_experts) if "{expert}" in rule.ours else [0]
            rules += [rule.at(layer, expert) for expert in experts]
    if architecture.mtp_num_layers:
        from roll_batching.huggingface.layer_rules import mtp_layer_rules  # few models have heads

        rules += mtp_layer_rules(family, architecture, (*attention, *OUTPUT_PROJECTION))
    rules += [] if family.encoder is None or architecture.vision is None else family.encoder.rules(architecture)
    return {rule.ours: rule.with_prefixes(family.prefixes) for rule in (*rules, FINAL_NORM, head)}


def untrained_tensors(family: Family, architecture: Any, config: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Names of tensors outside the trained model, among `names`; an export copies them.

    These are a vision encoder and layers of multi-token prediction that `architecture` does not train. Publishers
    number such layers after the model's own, or give them a prefix of `Family.untrained`.
    """
    heads = architecture.mtp_num_layers or 0
    trained = {"mtp.": heads, "model.visual.": architecture.vision}
    prefixes = tuple(prefix for prefix in family.untrained if not trained.get(prefix))
    if not family.untrained:
        numbers = (config.get(f"num_{name}") for name in ("nextn_predict_layers", "mtp_layers", "mtp_modules"))
        count = next((number for number in numbers if number), 0)
        first = architecture.num_layers
        prefixes = tuple(f"model.layers.{layer}." for layer in range(first + heads, first + count))
    return [name for name in names if name.startswith(prefixes)] if prefixes else []


def head_name(family: Family) -> str:
    """Name of the output layer's tensor, which files with tied embeddings may hold, too."""
    return HEAD.with_prefixes(family.prefixes).first_checkpoint_name
