"""Contradictions of settings of latent attention, hybrid layers, prediction heads and vision; what divides parts."""

from __future__ import annotations

from importlib import metadata
from typing import Any


def problem_of_parts(model: Any) -> str | None:
    """What contradicts `vision`, `mtp_num_layers`, `hybrid` or `multi_latent_attention` in an `ArchitectureConfig`."""
    if model.vision is not None:
        return vision_contradiction(model)
    if model.mtp_num_layers and (problem := _heads_problem(model)) is not None:
        return problem
    if model.hybrid is not None:
        return _hybrid_problem(model)
    return None if model.multi_latent_attention is None else _latent_problem(model)


_WITHOUT_HEADS = (
    "hybrid", "sliding_window", "sandwich_norms", "scaled_embedding", "add_bias_linear", "attention_sinks",
)  # fmt: skip
"""Settings of models whose heads of multi-token prediction have no counterpart here."""


def _heads_problem(model: Any) -> str | None:
    for name in _WITHOUT_HEADS:
        if getattr(model, name):
            return f"mtp_num_layers is not supported with {name} for now: leave it out"
    return None


def problems_of_heads(model: Any, *, engine_layers: bool, rotates: bool, stages: int) -> list[str]:
    """What heads of multi-token prediction are not supported with, in a model that has them.

    Args:
        model: the `ArchitectureConfig`.
        engine_layers: whether layers are TransformerEngine's.
        rotates: whether the attention backend rotates.
        stages: pipeline-parallel size.
    """
    problems = [] if (problem := _heads_problem(model)) is None else [problem]
    if engine_layers or not rotates:
        problems.append(
            "heads of multi-token prediction (mtp_num_layers) are tested beside Megatron's local layers and attention "
            "that rotates only: set transformer_impl: local, and choose attention_backend dense, varlen or flash_attn"
        )
    if model.tie_word_embeddings and stages > 1:
        problems.append(
            "heads of multi-token prediction (mtp_num_layers) with tied embeddings need one pipeline stage: Megatron "
            "gives the last stage a second copy of the head, which nothing trains. Set pipeline_model_parallel_size: 1"
        )
    return problems


def _latent_problem(model: Any) -> str | None:
    latent, ending = model.multi_latent_attention, "has no effect with multi_latent_attention: leave it out"
    if model.kv_channels not in (None, latent.qk_head_dim + latent.qk_pos_emb_head_dim):
        return f"kv_channels {ending}"
    if model.kv_heads != model.num_attention_heads:
        return f"num_query_groups {ending}"
    for name in (
        "qk_layernorm", "add_qkv_bias", "add_bias_linear", "attention_sinks", "query_pre_attn_scalar",
        "rotary_local_base", "zero_centered_norms", "sandwich_norms", "attention_output_gate", "gated_delta_net",
    ):  # fmt: skip
        if getattr(model, name):
            return f"{name} {ending}"
    return f"rotary_percent {ending}" if model.rotary_percent != 1 else None


_ELSEWHERE: dict[str, Any] = {
    "activation": "silu",
    **dict.fromkeys(
        (
            "add_qkv_bias", "add_bias_linear", "attention_output_gate", "attention_sinks", "gated_delta_net",
            "multi_latent_attention", "qk_layernorm", "query_pre_attn_scalar", "rope_scaling", "rotary_local_base",
            "sandwich_norms", "scaled_embedding", "sliding_window", "swiglu_limit", "zero_centered_norms",
        )
    ),
    "rotary_percent": 1.0,
}  # fmt: skip
"""Settings of models without `hybrid`, with their values where they are off."""


def _hybrid_problem(model: Any) -> str | None:
    """What contradicts `hybrid` in an `ArchitectureConfig`; None if nothing does."""
    pattern, hybrid = model.hybrid.pattern, model.hybrid
    if set(pattern) - set("M*-E") or "M" not in pattern:
        return "hybrid.pattern must have letters M, *, - and E only, and M at least once"
    if hybrid.mamba_num_heads % hybrid.mamba_num_groups:
        return f"hybrid.mamba_num_heads must be a multiple of mamba_num_groups={hybrid.mamba_num_groups}"
    if len(pattern) != model.num_layers:
        return f"hybrid.pattern has {len(pattern)} letters for {model.num_layers} layers"
    for name, off in _ELSEWHERE.items():
        if (getattr(model, name) or None) != off:
            return f"{name} has no effect with hybrid: leave it out"
    mixtures = tuple(int(kind == "E") for kind in pattern)
    if (model.moe is None) == any(mixtures):
        return "moe and the letter E of hybrid.pattern belong together: give both, or neither"
    if model.moe is not None and model.moe.layer_freq != mixtures:
        return "moe.layer_freq must have 1 for each letter E of hybrid.pattern and 0 for the others"
    if model.moe is not None and model.moe.shared_expert_gate:
        return "moe.shared_expert_gate has no effect with hybrid: leave it out"
    if model.moe is None and model.hybrid.moe_latent_size is not None:
        return "hybrid.moe_latent_size has no effect without moe: leave it out"
    return None


def mamba_misfit(hybrid: Any, tp_size: int, cp_size: int) -> str | None:
    """Why ranks cannot divide Mamba layers with the sizes of a `HybridConfig`; None if they can.

    Context-parallel ranks may be more than the groups of a tensor-parallel rank: they then divide the heads of a group,
    whose B and C each of them gets. Megatron-Core (0.16 to 0.19) has the same rules.
    """
    groups, heads = hybrid.mamba_num_groups, hybrid.mamba_num_heads
    if groups % tp_size:
        return f"{groups} groups of Mamba layers do not divide among TP = {tp_size} ranks; lower TP"
    local = groups // tp_size
    if local % cp_size and cp_size % local:
        text = f"{local} groups of Mamba layers on each of TP = {tp_size} ranks and CP = {cp_size}"
        return f"{text}: one must be a multiple of the other; change CP"
    if heads // tp_size % cp_size:
        return f"{heads} heads of Mamba layers do not divide among TP x CP = {tp_size * cp_size} ranks; lower CP"
    return None


# ---- vision


_UNTESTED = (
    "mtp_num_layers", "moe", "multi_latent_attention", "hybrid", "gated_delta_net", "sliding_window", "sandwich_norms",
    "scaled_embedding", "zero_centered_norms", "add_bias_linear", "attention_sinks", "attention_output_gate",
    "hidden_dropout",
)  # fmt: skip
"""Settings of an architecture that no family with a trained encoder has."""


def vision_contradiction(model: Any) -> str | None:
    """What contradicts `vision` in an `ArchitectureConfig`; None if nothing does."""
    for name in _UNTESTED:
        if getattr(model, name):
            return f"{name} is not supported with vision for now: leave it out"
    if model.rotary_percent != 1:
        return "rotary_percent is not supported with vision for now: leave it out"
    pairs = sum(model.vision.mrope_section)
    if 2 * pairs != model.head_dim:
        return f"vision.mrope_section has {pairs} pairs of channels, and a head has {model.head_dim} channels"
    tokens = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    ids = [getattr(model.vision, name) for name in tokens]
    if len(set(ids)) < len(ids) or max(ids) >= model.vocab_size:
        return f"vision has the tokens {ids} as {', '.join(tokens)}: give four different tokens of the vocabulary"
    return None


def vision_problems(*, engine_layers: bool, rotates: bool, value_head: bool, fp8: str | None) -> list[str]:
    """Why a model with a vision encoder cannot be built here.

    Args:
        engine_layers: whether layers are TransformerEngine's.
        rotates: whether the attention backend rotates.
        value_head: whether the model is a critic.
        fp8: format of FP8 training, or None.
    """
    problems = []
    if engine_layers or not rotates:
        problems.append(
            "models with a vision encoder are tested beside Megatron's local layers and attention that rotates only: "
            "set transformer_impl: local, and choose attention_backend dense, varlen or flash_attn"
        )
    if value_head:
        problems.append("a critic with a vision encoder is not supported for now: use an advantage without a critic")
    if fp8 is not None:
        problems.append("fp8 is not supported with a vision encoder for now: leave it out")
    found = ""
    try:
        import transformers.models.qwen2_5_vl.modeling_qwen2_5_vl  # noqa: F401

        if int((installed := metadata.version("transformers")).split(".")[0]) < 5:
            found = f"is version {installed}"
    except ImportError as error:
        found = f"cannot be imported ({error})"
    if found:
        problems.append(
            f"the vision encoder is that of transformers, which {found}: install 'roll-batching[vision]' with "
            "transformers 5"
        )
    return problems
