"""What a vision encoder is not supported with, and settings that contradict it."""

from __future__ import annotations

from importlib import metadata
from typing import Any

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
