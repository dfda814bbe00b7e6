"""Rules for the tensors of a layer's parts, which the tables of families are made of.

Sources: Hugging Face's transformers for the names on the right, and Megatron-Core's GPTModel for those on the left.
Heads of multi-token prediction: the index of safetensors files of the models, and vLLM's `deepseek_mtp.py` and
`qwen3_next_mtp.py`. DeepSeek-V3 and GLM-4.5 number heads like further layers of the model; Qwen3-Next and Qwen3.5 name
their one head `mtp`. All of them join the embedding and the hidden state in this order, as Megatron's `eh_proj` does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from roll_batching.errors import ConfigError
from roll_batching.huggingface.family import Family
from roll_batching.huggingface.tensors import Join, TensorRule

EMBEDDING = TensorRule(
    "embedding.word_embeddings.weight", "vocabulary", (("model.embed_tokens.weight", ("vocabulary", "hidden")),)
)
FINAL_NORM = TensorRule("decoder.final_layernorm.weight", "copy", (("model.norm.weight", ("hidden",)),))
HEAD = TensorRule("output_layer.weight", "vocabulary", (("lm_head.weight", ("vocabulary", "hidden")),))


def _layer(
    ours: str,
    join: Join,
    *theirs: tuple[str, tuple[str, ...]],
    fused: str | None = None,
    parts: tuple[tuple[str, ...], ...] = (),
) -> TensorRule:
    """A rule for a parameter of every layer; names are relative to the layer on both sides."""
    return TensorRule(
        f"decoder.layers.{{layer}}.{ours}",
        join,
        tuple((f"model.layers.{{layer}}.{name}", shape) for name, shape in theirs),
        None if fused is None else f"decoder.layers.{{layer}}.{fused}",
        parts=parts,
    )


QKV = (
    _layer(
        "input_layernorm.weight",
        "copy",
        ("input_layernorm.weight", ("hidden",)),
        fused="self_attention.linear_qkv.layer_norm_weight",
    ),
    _layer(
        "self_attention.linear_qkv.weight",
        "qkv",
        ("self_attn.q_proj.weight", ("queries", "hidden")),
        ("self_attn.k_proj.weight", ("keys", "hidden")),
        ("self_attn.v_proj.weight", ("keys", "hidden")),
    ),
)
OUTPUT_PROJECTION = (
    _layer("self_attention.linear_proj.weight", "columns", ("self_attn.o_proj.weight", ("hidden", "values"))),
)
QKV_BIAS = (
    _layer(
        "self_attention.linear_qkv.bias",
        "qkv",
        ("self_attn.q_proj.bias", ("queries",)),
        ("self_attn.k_proj.bias", ("keys",)),
        ("self_attn.v_proj.bias", ("keys",)),
    ),
)
QK_NORM = (
    _layer("self_attention.q_layernorm.weight", "copy", ("self_attn.q_norm.weight", ("head",))),
    _layer("self_attention.k_layernorm.weight", "copy", ("self_attn.k_norm.weight", ("head",))),
)
QK_NORM_OF_ALL_HEADS = (
    _layer("self_attention.q_layernorm.weight", "copy", ("self_attn.q_norm.weight", ("queries",))),
    _layer("self_attention.k_layernorm.weight", "copy", ("self_attn.k_norm.weight", ("keys",))),
)
_FEED_FORWARD = (
    _layer(
        "mlp.linear_fc1.weight",
        "gated",
        ("mlp.gate_proj.weight", ("ffn", "hidden")),
        ("mlp.up_proj.weight", ("ffn", "hidden")),
    ),
    _layer("mlp.linear_fc2.weight", "columns", ("mlp.down_proj.weight", ("hidden", "ffn"))),
)
DENSE = (
    _layer(
        "pre_mlp_layernorm.weight",
        "copy",
        ("post_attention_layernorm.weight", ("hidden",)),
        fused="mlp.linear_fc1.layer_norm_weight",
    ),
    *_FEED_FORWARD,
)
SANDWICH_DENSE = (
    _layer("post_attention_layernorm.weight", "copy", ("post_attention_layernorm.weight", ("hidden",))),
    _layer("pre_mlp_layernorm.weight", "copy", ("pre_feedforward_layernorm.weight", ("hidden",))),
    _layer("post_mlp_layernorm.weight", "copy", ("post_feedforward_layernorm.weight", ("hidden",))),
    *_FEED_FORWARD,
)
"""A dense layer with norms behind its parts, too, in Gemma's names."""


def mixture(block: str, gate: str, up: str, down: str) -> tuple[TensorRule, ...]:
    """Rules of a mixture layer, from a family's names of the block and of an expert's three projections."""
    expert = f"{block}.experts.{{expert}}"
    return (
        _layer("pre_mlp_layernorm.weight", "copy", ("post_attention_layernorm.weight", ("hidden",))),
        _layer("mlp.router.weight", "copy", (f"{block}.gate.weight", ("experts", "hidden"))),
        _layer(
            "mlp.experts.local_experts.{expert}.linear_fc1.weight",
            "gated",
            (f"{expert}.{gate}.weight", ("expert_ffn", "hidden")),
            (f"{expert}.{up}.weight", ("expert_ffn", "hidden")),
            fused="mlp.experts.linear_fc1.weight{expert}",
        ),
        _layer(
            "mlp.experts.local_experts.{expert}.linear_fc2.weight",
            "columns",
            (f"{expert}.{down}.weight", ("hidden", "expert_ffn")),
            fused="mlp.experts.linear_fc2.weight{expert}",
        ),
    )


SHARED_EXPERTS = (
    _layer(
        "mlp.shared_experts.linear_fc1.weight",
        "gated",
        ("mlp.shared_experts.gate_proj.weight", ("shared_ffn", "hidden")),
        ("mlp.shared_experts.up_proj.weight", ("shared_ffn", "hidden")),
    ),
    _layer(
        "mlp.shared_experts.linear_fc2.weight",
        "columns",
        ("mlp.shared_experts.down_proj.weight", ("hidden", "shared_ffn")),
    ),
)
EXPERT_BIAS = (_layer("mlp.router.expert_bias", "copy", ("mlp.gate.e_score_correction_bias", ("experts",))),)
"""The rule of a router's expert bias, a buffer on both sides: no gradient reaches it."""


def latent_attention(compressed_queries: bool) -> tuple[TensorRule, ...]:
    """Rules of the projections of DeepSeek's multi-latent attention, with or without a latent of the queries."""
    layer = "self_attention"
    norm = _layer("input_layernorm.weight", "copy", ("input_layernorm.weight", ("hidden",)))
    queries: tuple[TensorRule, ...] = (
        _layer(f"{layer}.linear_q_proj.weight", "rows", ("self_attn.q_proj.weight", ("queries", "hidden"))),
    )
    if compressed_queries:
        queries = (
            _layer(f"{layer}.linear_q_down_proj.weight", "rows", ("self_attn.q_a_proj.weight", ("q_latent", "hidden"))),
            _layer(f"{layer}.q_layernorm.weight", "copy", ("self_attn.q_a_layernorm.weight", ("q_latent",))),
            _layer(f"{layer}.linear_q_up_proj.weight", "rows", ("self_attn.q_b_proj.weight", ("queries", "q_latent"))),
        )
    down = ("self_attn.kv_a_proj_with_mqa.weight", ("kv_latent_and_rope", "hidden"))
    return (
        norm,
        *queries,
        _layer(f"{layer}.linear_kv_down_proj.weight", "rows", down),
        _layer(f"{layer}.kv_layernorm.weight", "copy", ("self_attn.kv_a_layernorm.weight", ("kv_latent",))),
        _layer(
            f"{layer}.linear_kv_up_proj.weight", "rows", ("self_attn.kv_b_proj.weight", ("keys_values", "kv_latent"))
        ),
    )


OUTPUT_BIAS = (_layer("self_attention.linear_proj.bias", "copy", ("self_attn.o_proj.bias", ("hidden",))),)
SINKS = (_layer("self_attention.core_attention.softmax_offset", "rows", ("self_attn.sinks", ("heads",))),)
_EXPERT = "mlp.experts.local_experts.{expert}"
STACKED_MIXTURE = (
    _layer("pre_mlp_layernorm.weight", "copy", ("post_attention_layernorm.weight", ("hidden",))),
    _layer("mlp.router.weight", "copy", ("mlp.router.weight", ("experts", "hidden"))),
    _layer("mlp.router.bias", "copy", ("mlp.router.bias", ("experts",))),
    _layer(
        f"{_EXPERT}.linear_fc1.weight",
        "expert_gated",
        ("mlp.experts.gate_up_proj", ("experts", "hidden", "expert_gated_ffn")),
    ),
    _layer(
        f"{_EXPERT}.linear_fc1.bias",
        "expert_gated",
        ("mlp.experts.gate_up_proj_bias", ("experts", "expert_gated_ffn")),
    ),
    _layer(f"{_EXPERT}.linear_fc2.weight", "expert", ("mlp.experts.down_proj", ("experts", "expert_ffn", "hidden"))),
    _layer(f"{_EXPERT}.linear_fc2.bias", "expert", ("mlp.experts.down_proj_bias", ("experts", "hidden"))),
)
"""gpt-oss's mixture, whose experts are stacked into one tensor."""
STACKED_GATED_MIXTURE = (
    *STACKED_MIXTURE[:1],
    _layer("mlp.router.weight", "copy", ("mlp.gate.weight", ("experts", "hidden"))),
    _layer(
        f"{_EXPERT}.linear_fc1.weight",
        "expert_halves",
        ("mlp.experts.gate_up_proj", ("experts", "hidden", "expert_gated_ffn")),
    ),
    _layer(
        f"{_EXPERT}.linear_fc2.weight", "expert_rows", ("mlp.experts.down_proj", ("experts", "expert_ffn", "hidden"))
    ),
)
"""Qwen3-VL's mixture, stacked likewise, with gates before up projections instead of alternating with them."""

_INPUT_NORM = _layer("input_layernorm.weight", "copy", ("input_layernorm.weight", ("hidden",)))
GATED_QKV = (
    QKV[0],
    _layer(
        "self_attention.linear_qkv.weight",
        "gated_qkv",
        ("self_attn.q_proj.weight", ("gated_queries", "hidden")),
        ("self_attn.k_proj.weight", ("keys", "hidden")),
        ("self_attn.v_proj.weight", ("keys", "hidden")),
    ),
)
"""Self-attention with an output gate: in `q_proj` the rows of a head's gate follow the rows of its query."""
_MIXED = ("delta_keys", "delta_keys", "delta_values")
_DELTA = (
    _INPUT_NORM,
    _layer(
        "self_attention.conv_weight",
        "by_unit",
        ("linear_attn.conv1d.weight", ("delta_mixed", "one", "conv_kernel")),
        parts=(_MIXED,),
    ),
    _layer("self_attention.A_log", "rows", ("linear_attn.A_log", ("delta_value_heads",))),
    _layer("self_attention.dt_bias", "rows", ("linear_attn.dt_bias", ("delta_value_heads",))),
    _layer("self_attention.out_norm_weight", "copy", ("linear_attn.norm.weight", ("delta_value_dim",))),
    _layer("self_attention.out_proj.weight", "columns", ("linear_attn.out_proj.weight", ("hidden", "delta_values"))),
)
DELTA_NET = (
    *_DELTA,
    _layer(
        "self_attention.in_proj.weight",
        "by_unit",
        ("linear_attn.in_proj_qkvz.weight", ("delta_gated", "hidden")),
        ("linear_attn.in_proj_ba.weight", ("delta_rates", "hidden")),
        parts=(("delta_gated",), ("delta_rates",)),
    ),
)
"""A gated delta net in Qwen3-Next's names, whose projections are grouped by key head."""
SPLIT_DELTA_NET = (
    *_DELTA,
    _layer(
        "self_attention.in_proj.weight",
        "by_unit",
        ("linear_attn.in_proj_qkv.weight", ("delta_mixed", "hidden")),
        ("linear_attn.in_proj_z.weight", ("delta_values", "hidden")),
        ("linear_attn.in_proj_b.weight", ("delta_value_heads", "hidden")),
        ("linear_attn.in_proj_a.weight", ("delta_value_heads", "hidden")),
        parts=(_MIXED, ("delta_values",), ("delta_value_heads",), ("delta_value_heads",)),
    ),
)
"""A gated delta net in Qwen3.5's names."""
GATED_SHARED_EXPERT = (
    _layer(
        "mlp.shared_experts.linear_fc1.weight",
        "gated",
        ("mlp.shared_expert.gate_proj.weight", ("shared_ffn", "hidden")),
        ("mlp.shared_expert.up_proj.weight", ("shared_ffn", "hidden")),
    ),
    _layer(
        "mlp.shared_experts.linear_fc2.weight",
        "columns",
        ("mlp.shared_expert.down_proj.weight", ("hidden", "shared_ffn")),
    ),
    _layer("mlp.shared_experts.gate_weight", "copy", ("mlp.shared_expert_gate.weight", ("one", "hidden"))),
)

_MAMBA_MIXED = ("mamba_inner", "mamba_states", "mamba_states")
MAMBA = (
    _layer("input_layernorm.weight", "copy", ("norm.weight", ("hidden",))),
    _layer(
        "self_attention.in_proj.weight",
        "by_unit",
        ("mixer.in_proj.weight", ("mamba_projected", "hidden")),
        parts=(("mamba_inner", *_MAMBA_MIXED, "mamba_heads"),),
    ),
    _layer(
        "self_attention.conv_weight",
        "by_unit",
        ("mixer.conv1d.weight", ("mamba_mixed", "one", "conv_kernel")),
        parts=(_MAMBA_MIXED,),
    ),
    _layer("self_attention.conv_bias", "by_unit", ("mixer.conv1d.bias", ("mamba_mixed",)), parts=(_MAMBA_MIXED,)),
    *(
        _layer(f"self_attention.{name}", "rows", (f"mixer.{name}", ("mamba_heads",)))
        for name in ("A_log", "D", "dt_bias")
    ),
    _layer("self_attention.norm_weight", "rows", ("mixer.norm.weight", ("mamba_inner",))),
    _layer("self_attention.out_proj.weight", "columns", ("mixer.out_proj.weight", ("hidden", "mamba_inner"))),
)
PLAIN_ATTENTION = (
    _layer("input_layernorm.weight", "copy", ("norm.weight", ("hidden",))),
    _layer(
        "self_attention.linear_qkv.weight",
        "qkv",
        ("mixer.q_proj.weight", ("queries", "hidden")),
        ("mixer.k_proj.weight", ("keys", "hidden")),
        ("mixer.v_proj.weight", ("keys", "hidden")),
    ),
    _layer("self_attention.linear_proj.weight", "columns", ("mixer.o_proj.weight", ("hidden", "values"))),
)


def _plain(ours: str, theirs: str, inputs: str, width: str) -> tuple[TensorRule, ...]:
    return (
        _layer(f"{ours}.linear_fc1.weight", "rows", (f"{theirs}.up_proj.weight", (width, inputs))),
        _layer(f"{ours}.linear_fc2.weight", "columns", (f"{theirs}.down_proj.weight", (inputs, width))),
    )


_PLAIN_NORM = _layer("pre_mlp_layernorm.weight", "copy", ("norm.weight", ("hidden",)))
PLAIN_MIXTURE = (
    _PLAIN_NORM,
    _layer("mlp.router.weight", "copy", ("mixer.gate.weight", ("experts", "hidden"))),
    _layer("mlp.router.expert_bias", "copy", ("mixer.gate.e_score_correction_bias", ("experts",))),
    *_plain("mlp.experts.local_experts.{expert}", "mixer.experts.{expert}", inputs="expert_hidden", width="expert_ffn"),
    *_plain("mlp.shared_experts", "mixer.shared_experts", inputs="hidden", width="shared_ffn"),
)
LATENT_EXPERTS = (
    _layer("mlp.fc1_latent_proj.weight", "copy", ("mixer.fc1_latent_proj.weight", ("latent", "hidden"))),
    _layer("mlp.fc2_latent_proj.weight", "copy", ("mixer.fc2_latent_proj.weight", ("hidden", "latent"))),
)
PLAIN_MLP = (_PLAIN_NORM, *_plain("mlp", "mixer", inputs="hidden", width="ffn"))


# ---- heads of multi-token prediction


_NUMBERED = {
    "enorm": "enorm.weight",
    "hnorm": "hnorm.weight",
    "eh_proj": "eh_proj.weight",
    "final_layernorm": "shared_head.norm.weight",
}
_NAMED = {
    "enorm": "mtp.pre_fc_norm_embedding.weight",
    "hnorm": "mtp.pre_fc_norm_hidden.weight",
    "eh_proj": "mtp.fc.weight",
    "final_layernorm": "mtp.norm.weight",
}
_COPIES = {"embed_tokens.weight": EMBEDDING, "shared_head.head.weight": HEAD}
"""Tensors of a numbered head that repeat the model's embedding and output layer."""


def count_mtp_heads(family: Family, config: Mapping[str, Any]) -> int:
    """Number of heads by a directory's `config.json`; 0 for families whose heads are not supported."""
    if family.sigmoid_routing and not family.hybrid:
        count = config.get("num_nextn_predict_layers") or config.get("num_mtp_layers")
        return count if isinstance(count, int) else 0
    if family.delta_net:
        text_config = config.get("text_config")
        fields = text_config if isinstance(text_config, Mapping) else config
        return 1 if fields.get("mtp_num_hidden_layers", 1) else 0  # Qwen3-Next has no such field, and one head
    return 0


def mtp_heads_problem(family: Family, config: Mapping[str, Any], wanted: int) -> str | None:
    """Message if the checkpoint's `config.json` has fewer than `wanted` heads of multi-token prediction, else None."""
    stored_heads = count_mtp_heads(family, config)
    if stored_heads >= wanted:
        return None
    return f"is {wanted}, and the model directory has {stored_heads} heads of multi-token prediction; lower it to that"


def mtp_layer_rules(family: Family, architecture: Any, attention: Sequence[TensorRule]) -> list[TensorRule]:
    """Rules of all heads, with the rules `attention` of a layer. Raises `ConfigError` for families without heads."""
    if not (family.sigmoid_routing or family.delta_net) or family.hybrid:
        raise ConfigError(
            f"{family.architecture} has no heads of multi-token prediction here: leave mtp_num_layers out"
        )
    rules: list[TensorRule] = []
    for head in range(architecture.mtp_num_layers):
        layer, ours = architecture.num_layers + head, f"mtp.layers.{head}"
        theirs = f"model.layers.{layer}" if family.sigmoid_routing else ours
        for name, stored in (_NUMBERED if family.sigmoid_routing else _NAMED).items():
            stored = f"{theirs}.{stored}" if family.sigmoid_routing else stored
            joins = name == "eh_proj"
            shape = ("hidden", "hidden_pair") if joins else ("hidden",)
            rules.append(TensorRule(f"{ours}.{name}.weight", "rows" if joins else "copy", ((stored, shape),)))
        for rule in (*attention, *(DENSE if architecture.moe is None else family.mixture)):
            experts: Sequence[int | None] = range(architecture.moe.num_experts) if "{expert}" in rule.ours else [None]
            for expert in experts:
                numbered_rule = rule.at(layer, expert).with_prefixes([(f"model.layers.{layer}.", f"{theirs}.")])
                name = numbered_rule.ours.replace(f"decoder.layers.{layer}.", f"{ours}.transformer_layer.")
                rules.append(dataclasses.replace(numbered_rule, ours=name, fused=None))
    return rules


def copies_in_heads(family: Family, architecture: Any, names: Iterable[str]) -> dict[str, str]:
    """Copies of the model's tensors in trained heads, among `names`: the copied tensor by the copy's name."""
    if not architecture.mtp_num_layers or not family.sigmoid_routing:
        return {}
    layers = range(architecture.num_layers, architecture.num_layers + architecture.mtp_num_layers)
    copied = {f"model.layers.{n}.{name}": rule.first_checkpoint_name for n in layers for name, rule in _COPIES.items()}
    return {name: copied[name] for name in names if name in copied}
