"""The model families that can be read and written: one table each, of `config.json`'s fields and of tensors.

Every field of a family's `config.json` stands in one of its tables, or in `WITHOUT_EFFECT`; a field that stands nowhere
is refused by name. Sources: the configuration and modeling files of the family in Hugging Face's transformers, and
Megatron-Core's GPTModel for the names on our side.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from roll_batching.huggingface.tensors import TensorRule

# ---- tensors

EMBEDDING = TensorRule(
    "embedding.word_embeddings.weight", "vocabulary", (("model.embed_tokens.weight", ("vocabulary", "hidden")),)
)
FINAL_NORM = TensorRule("decoder.final_layernorm.weight", "copy", (("model.norm.weight", ("hidden",)),))
HEAD = TensorRule("output_layer.weight", "vocabulary", (("lm_head.weight", ("vocabulary", "hidden")),))


def _layer(ours: str, join: Any, *theirs: tuple[str, tuple[str, ...]], fused: str | None = None) -> TensorRule:
    return TensorRule(
        f"decoder.layers.{{layer}}.{ours}",
        join,
        tuple((f"model.layers.{{layer}}.{name}", shape) for name, shape in theirs),
        None if fused is None else f"decoder.layers.{{layer}}.{fused}",
    )


ATTENTION = (
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
    _layer("self_attention.linear_proj.weight", "columns", ("self_attn.o_proj.weight", ("hidden", "queries"))),
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
DENSE = (
    _layer(
        "pre_mlp_layernorm.weight",
        "copy",
        ("post_attention_layernorm.weight", ("hidden",)),
        fused="mlp.linear_fc1.layer_norm_weight",
    ),
    _layer(
        "mlp.linear_fc1.weight",
        "gated",
        ("mlp.gate_proj.weight", ("ffn", "hidden")),
        ("mlp.up_proj.weight", ("ffn", "hidden")),
    ),
    _layer("mlp.linear_fc2.weight", "columns", ("mlp.down_proj.weight", ("hidden", "ffn"))),
)


def _mixture(block: str, gate: str, up: str, down: str) -> tuple[TensorRule, ...]:
    """A layer's experts, under the names that a family gives to the block and to an expert's three projections."""
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


# ---- fields

RENAMED: Mapping[str, str] = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_query_groups",
    "head_dim": "kv_channels",
    "intermediate_size": "ffn_hidden_size",
    "max_position_embeddings": "max_position_embeddings",
    "rms_norm_eps": "norm_epsilon",
    "tie_word_embeddings": "tie_word_embeddings",
    "initializer_range": "init_std",
}
"""Fields of every family and the settings of `model_args.architecture` that say the same."""
OPTIONAL = ("num_key_value_heads", "head_dim")
"""Those of them that may be null: as many key heads as query heads, hidden_size / num_attention_heads."""

ROPE = ("rope_theta", "rope_scaling", "rope_parameters")
SLIDING = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")
EXPERTS = (
    "num_local_experts",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "norm_topk_prob",
    "decoder_sparse_step",
    "mlp_only_layers",
    "router_aux_loss_coef",
    "output_router_logits",
)

ALWAYS: Mapping[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "pretraining_tp": 1,
    "attention_dropout": 0.0,
    "router_jitter_noise": 0.0,
    "is_encoder_decoder": False,
    "is_decoder": False,
    "add_cross_attention": False,
    "use_mrope": False,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
    "chunk_size_feed_forward": 0,
    "pruned_heads": {},
    "output_attentions": False,
    "output_hidden_states": False,
}
"""Fields with one value that is computed here; another one is refused."""

TOKENS = ("eos_token_id", "bos_token_id", "pad_token_id")
WITHOUT_EFFECT = frozenset(
    {
        "_name_or_path",
        "_attn_implementation",
        "_attn_implementation_autoset",
        "attn_implementation",
        "architectures",  # looked at apart
        "model_type",
        "dtype",  # of the files: `stored_dtype`
        "torch_dtype",
        "transformers_version",
        "use_cache",
        "return_dict",
        "torchscript",
        "id2label",
        "label2id",
        "problem_type",
        "finetuning_task",
        "task_specific_params",
        "tokenizer_class",
        "prefix",
        *TOKENS,
    }
)
"""Fields that say nothing of what the model computes."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """One model family of transformers."""

    model_type: str
    architecture: str
    """The class named in `architectures`."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What a field means that is not there: the family's configuration class says so."""
    add_qkv_bias: bool = False
    qk_layernorm: bool = False
    windows: bool = False
    """Whether sliding windows are among its fields."""
    mixture: tuple[TensorRule, ...] = ()
    """The rules of a layer of experts; empty for dense families."""
    experts_share_ffn: bool = False
    """Whether `intermediate_size` is the experts' width."""
    normalised_experts: bool = False
    """Whether the weights of a token's experts always sum to one; else `norm_topk_prob` says it."""


_USUAL = {"rope_theta": 10000.0, "tie_word_embeddings": False, "initializer_range": 0.02}

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
            mixture=_mixture("mlp", "gate_proj", "up_proj", "down_proj"),
        ),
        Family(
            model_type="mixtral",
            architecture="MixtralForCausalLM",
            defaults={**_USUAL, "rope_theta": 1e6, "head_dim": None, "sliding_window": None},
            windows=True,
            mixture=_mixture("block_sparse_moe", "w1", "w3", "w2"),
            experts_share_ffn=True,
            normalised_experts=True,
        ),
    )
}


def rules_of(family: Family, architecture: Any) -> dict[str, TensorRule]:
    """The rule of every parameter of a whole model, by its name in the local layer spec.

    `architecture` are the settings `model_args.architecture`. With tied embeddings the output layer is made of the
    embedding's tensor.
    """
    head = HEAD
    if architecture.tie_word_embeddings:
        head = TensorRule(HEAD.ours, HEAD.join, EMBEDDING.theirs)
    rules = [EMBEDDING]
    for layer in range(architecture.num_layers):
        always = (*ATTENTION, *(QKV_BIAS if family.add_qkv_bias else ()), *(QK_NORM if family.qk_layernorm else ()))
        rules += [rule.at(layer) for rule in always]
        if architecture.moe is None or not architecture.moe.is_mixture(layer):
            rules += [rule.at(layer) for rule in DENSE]
            continue
        for rule in family.mixture:
            experts = range(architecture.moe.num_experts) if "{expert}" in rule.ours else [0]
            rules += [rule.at(layer, expert) for expert in experts]
    return {rule.ours: rule for rule in (*rules, FINAL_NORM, head)}
