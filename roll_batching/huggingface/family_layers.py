"""Families with layers of their own, in the names of their publishers' files: Nemotron-H, and MiniMax-M2 (M2 to M2.7).

Sources: transformers' `nemotron_h` and the index files of NVIDIA-Nemotron-Nano-12B-v2 and NVIDIA-Nemotron-3;
transformers' `minimax_m2`, and for fields that it does not read, the publisher's `config.json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roll_batching.huggingface.family import Family
from roll_batching.huggingface.layer_rules import (
    EXPERT_BIAS,
    LATENT_EXPERTS,
    MAMBA,
    PLAIN_ATTENTION,
    PLAIN_MIXTURE,
    PLAIN_MLP,
    mixture,
)
from roll_batching.huggingface.tensors import TensorRule

NEMOTRON_H = Family(
    model_type="nemotron_h",
    architecture="NemotronHForCausalLM",
    defaults={
        "vocab_size": 131072,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 21504,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
    },
    always={
        "mlp_hidden_act": "relu2",
        "mamba_hidden_act": "silu",
        "use_conv_bias": True,
        "use_bias": False,
        "mamba_proj_bias": False,
        "residual_in_fp32": False,
        "hidden_dropout": 0.0,
        "n_shared_experts": 1,
        "output_router_logits": False,
        "sliding_window": None,
    },
    hybrid={
        "M": MAMBA,
        "*": PLAIN_ATTENTION,
        "-": PLAIN_MLP,
        "E": PLAIN_MIXTURE,
    },
    prefixes=(
        ("model.embed_tokens.", "backbone.embeddings."),
        ("model.norm.", "backbone.norm_f."),
        ("model.layers.", "backbone.layers."),
    ),
    untrained=("mtp.",),
)


def hybrid_layer(family: Family, architecture: Any, layer: int) -> list[TensorRule]:
    """The rules of a layer of an `ArchitectureConfig` with `hybrid`."""
    kind = architecture.hybrid.pattern[layer]
    rules = family.hybrid[kind]
    if kind == "E" and architecture.hybrid.moe_latent_size is not None:
        rules = (*rules, *LATENT_EXPERTS)
    experts = range(architecture.moe.num_experts) if kind == "E" else range(1)
    return [rule.at(layer, expert) for rule in rules for expert in (experts if "{expert}" in rule.ours else range(1))]


# ---- MiniMax-M2


_HEAD_DIM = 128
_WITHOUT_EFFECT = ("use_mtp", "mtp_transformer_layers", "mlp_intermediate_size")
"""The publisher's fields of parts that its files do not have."""


def _rewrite(config: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """`config` with `rotary_dim` as a share of a head, and without the publisher's fields that have no effect."""
    fields = {name: value for name, value in config.items() if name not in _WITHOUT_EFFECT}
    kinds, layers = fields.pop("attn_type_list", None), fields.get("num_hidden_layers")
    if kinds is not None and not (isinstance(layers, int) and kinds == [1] * layers):
        problems.append(f"attn_type_list must have 1 (full attention) for each of {layers} layers")
    modules = fields.pop("num_mtp_modules", None) or 0
    if isinstance(modules, bool) or not isinstance(modules, int) or modules < 0:
        problems.append(f"num_mtp_modules: {modules!r} is not supported, it must be a number")
    width, head, share = fields.pop("rotary_dim", None), fields.get("head_dim"), fields.get("partial_rotary_factor")
    rope = fields.get("rope_parameters")
    if share is None and isinstance(rope, Mapping):
        share = rope.get("partial_rotary_factor")
    if width is not None:
        head = _HEAD_DIM if head is None else head
        if isinstance(width, bool) or not isinstance(width, int) or not isinstance(head, int) or not 0 < width <= head:
            problems.append(f"rotary_dim: {width!r} is not supported, it must be a number of channels up to head_dim")
            return fields
        if share not in (None, width / head):
            other = f"partial_rotary_factor: {share!r}"
            problems.append(f"rotary_dim: {width!r} contradicts {other}; leave one of them out")
        share = width / head
    return fields if share is None else {**fields, "partial_rotary_factor": share}


_BIAS_NAMES = ("model.layers.{layer}.mlp.gate.", "model.layers.{layer}.block_sparse_moe.")
MINIMAX_M2 = Family(
    model_type="minimax_m2",
    architecture="MiniMaxM2ForCausalLM",
    defaults={
        "head_dim": _HEAD_DIM,
        "rope_theta": 5e6,
        "partial_rotary_factor": 1.0,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
    },
    always={
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "use_routing_bias": True,
        "shared_intermediate_size": 0,
        "shared_moe_mode": "sigmoid",  # of shared experts, which it does not have
        "layernorm_full_attention_beta": 1.0,
        "layernorm_linear_attention_beta": 1.0,
        "layernorm_mlp_beta": 1.0,
        "sliding_window": None,
    },
    qk_layernorm="all_heads",
    partial_rope=True,
    rewrite=_rewrite,
    mixture=(
        *mixture("block_sparse_moe", "w1", "w3", "w2"),
        *(rule.with_prefixes([_BIAS_NAMES]) for rule in EXPERT_BIAS),
    ),
    experts_share_ffn=True,
    normalised_experts=True,
    router={"router_score_function": "sigmoid", "router_expert_bias": True, "router_dtype": "fp32"},
)
