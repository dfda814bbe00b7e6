"""Contradictions between parts of a model, and sizes that divide them. Few models have such parts."""

from __future__ import annotations

from importlib import metadata
from typing import Any

from roll_batching.settings.support import ARCHITECTURE_REFUSALS, Parts, refused_pairs


def problem_of_parts(model: Any) -> str | None:
    """The first contradiction of an `ArchitectureConfig`'s parts, or of sizes of vision and hybrid, else None."""
    parts = Parts(None, model, None, "local")
    if (row := next(refused_pairs(ARCHITECTURE_REFUSALS, parts), None)) is not None:
        return f"{row.path[-1]} {row.reason}: {row.cure}"
    if model.vision is not None:
        return _vision_problem(model)
    if model.hybrid is not None:
        return _hybrid_problem(model)
    latent = model.multi_latent_attention
    if latent is not None and model.kv_channels not in (None, latent.qk_head_dim + latent.qk_pos_emb_head_dim):
        return "kv_channels has no effect with multi_latent_attention: leave it out"
    return None


def _hybrid_problem(model: Any) -> str | None:
    pattern, hybrid = model.hybrid.pattern, model.hybrid
    if set(pattern) - set("M*-E") or "M" not in pattern:
        return "hybrid.pattern must have letters M, *, - and E only, and M at least once"
    if hybrid.mamba_num_heads % hybrid.mamba_num_groups:
        return f"hybrid.mamba_num_heads must be a multiple of mamba_num_groups={hybrid.mamba_num_groups}"
    if len(pattern) != model.num_layers:
        return f"hybrid.pattern has {len(pattern)} letters for {model.num_layers} layers"
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


def recurrent_misfit(model: Any, *, tp_size: int, cp_size: int, divide: str) -> tuple[tuple[str, str], str] | None:
    """The key of an `ArchitectureConfig` whose recurrent layers ranks cannot divide, and why; None if they can.

    Context-parallel ranks divide heads under `divide` "heads" only: "auto" then divides the sequence.
    """
    cp_size = cp_size if divide == "heads" else 1
    if (delta := model.gated_delta_net) is not None and delta.num_key_heads % (ranks := tp_size * cp_size):
        among = f"TP = {tp_size} ranks" if cp_size == 1 else f"TP x CP = {ranks} ranks"
        text = f"{delta.num_key_heads} key heads of gated delta nets do not divide among {among}"
        return ("gated_delta_net", "num_key_heads"), f"{text}; {_cure(cp_size)}"
    if model.hybrid is not None and (misfit := _mamba_misfit(model.hybrid, tp_size, cp_size)) is not None:
        return ("hybrid", "mamba_num_groups"), f"{misfit}; {_cure(cp_size)}"
    return None


def _cure(cp_size: int) -> str:
    return "lower TP" if cp_size == 1 else "set recurrent_context_parallel to auto, or lower TP or CP"


def _mamba_misfit(hybrid: Any, tp_size: int, cp_size: int) -> str | None:
    """Why ranks cannot divide Mamba layers with the sizes of a `HybridConfig`; None if they can.

    CP may exceed the groups per TP rank: CP ranks then split a group's heads, and each keeps a copy of the group's B
    and C. Megatron-Core (0.16 to 0.19) has the same rules.
    """
    groups, heads = hybrid.mamba_num_groups, hybrid.mamba_num_heads
    if groups % tp_size:
        return f"{groups} groups of Mamba layers do not divide among TP = {tp_size} ranks"
    local = groups // tp_size
    if local % cp_size and cp_size % local:
        text = f"{local} groups of Mamba layers on each of TP = {tp_size} ranks and CP = {cp_size}"
        return f"{text}: one must be a multiple of the other"
    if heads // tp_size % cp_size:
        return f"{heads} heads of Mamba layers do not divide among TP x CP = {tp_size * cp_size} ranks"
    return None


def _vision_problem(model: Any) -> str | None:
    pairs, rotated = sum(model.vision.mrope_section), int(model.head_dim * model.rotary_percent)
    if 2 * pairs != rotated:
        return f"vision.mrope_section has {pairs} pairs of channels, and RoPE turns {rotated} channels of a head"
    if (added := len(model.vision.deepstack_visual_indexes)) > model.num_layers:
        return f"vision.deepstack_visual_indexes has outputs for {added} layers, and the model {model.num_layers}"
    tokens = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    ids = [getattr(model.vision, name) for name in tokens]
    if len(set(ids)) < len(ids) or max(ids) >= model.vocab_size:
        return f"vision has the tokens {ids} as {', '.join(tokens)}: give four different tokens of the vocabulary"
    return None


def encoder_problem() -> str | None:
    """Why transformers' vision encoder cannot be built here, or None if it can."""
    fault = ""
    try:
        import transformers.models.qwen2_5_vl.modeling_qwen2_5_vl  # noqa: F401

        if int((installed := metadata.version("transformers")).split(".")[0]) < 5:
            fault = f"is version {installed}"
    except ImportError as error:
        fault = f"cannot be imported ({error})"
    if not fault:
        return None
    return (
        f"the vision encoder is that of transformers, which {fault}: install 'roll-batching[vision]' with transformers "
        "5"
    )
