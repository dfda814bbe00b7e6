"""Translates the fields of layers with one part each, as in the `config.json` of Nemotron-H."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roll_batching.huggingface.expert_fields import translate_groups
from roll_batching.huggingface.translation import Translation

_LETTERS = {
    "mamba": "M",
    "linear_attention": "M",
    "attention": "*",
    "full_attention": "*",
    "mlp": "-",
    "moe": "E",
}
"""Names in `layers_block_type`, of the publisher and of transformers, and letters of `hybrid_override_pattern`."""
_MAMBA = {
    "mamba_num_heads": ("mamba_num_heads", 128),
    "mamba_head_dim": ("mamba_head_dim", 64),
    "n_groups": ("mamba_num_groups", 8),
    "ssm_state_size": ("mamba_state_dim", 128),
    "conv_kernel": ("mamba_conv_kernel_dim", 4),
}
"""Names in `architecture.hybrid`, and defaults."""
_EXPERTS = {
    "n_routed_experts": ("num_experts", 8),
    "num_experts_per_tok": ("router_topk", 2),
    "moe_intermediate_size": ("ffn_hidden_size", 7688),
    "moe_shared_expert_intermediate_size": ("shared_expert_ffn_hidden_size", 7688),
    "routed_scaling_factor": ("router_scaling_factor", 1.0),
}
"""Names in `architecture.moe`, and defaults."""
_DEFAULTS: Mapping[str, Any] = {
    **{name: default for name, (_, default) in (_MAMBA | _EXPERTS).items()},
    "moe_latent_size": None,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "time_step_limit": None,
    "hybrid_override_pattern": None,
    "layers_block_type": None,
}
_WITHOUT_EFFECT = frozenset(
    {
        "chunk_size",  # of a kernel
        "expand",  # mamba_num_heads and mamba_head_dim precede it
        "mamba_ssm_cache_dtype",
        "use_mamba_kernels",
        "num_logits_to_keep",
        "moe_shared_expert_overlap",
        "rescale_prenorm_residual",  # of random weights, with the three that follow
        "time_step_min",
        "time_step_max",
        "time_step_floor",
        "rope_theta",  # its attention has no RoPE
        "partial_rotary_factor",
        "num_nextn_predict_layers",  # layers of multi-token prediction are not trained
        "mtp_layers_block_type",
        "mtp_hybrid_override_pattern",
    }
)


def translate_hybrid(config: Mapping[str, Any], result: Translation) -> dict[str, Any]:
    """Sets `hybrid` and `moe` in the architecture; returns the fields that all families have."""
    own = {**_DEFAULTS, **{name: value for name, value in config.items() if name in _DEFAULTS}}
    rest = {name: value for name, value in config.items() if name not in _DEFAULTS and name not in _WITHOUT_EFFECT}
    _rename(rest, ("layer_norm_epsilon", "norm_eps"), "rms_norm_eps", result)
    _rename(rest, ("attention_head_dim",), "head_dim", result)
    pattern = _pattern(own, rest, result)
    if own["time_step_limit"] not in (None, [0.0, float("inf")], [0.0, {"__float__": "Infinity"}]):
        result.problems.append(
            f"time_step_limit: {own['time_step_limit']!r} is not supported, only [0.0, Infinity]: time steps have no "
            "other limits in Megatron-Core"
        )
    if pattern is None:
        return rest
    hybrid = {"pattern": pattern, **{ours: own[name] for name, (ours, _) in _MAMBA.items()}}
    if "E" in pattern:
        hybrid["moe_latent_size"] = own["moe_latent_size"]
        result.architecture["moe"] = _mixture(own, pattern, result)
    result.architecture["hybrid"] = hybrid
    return rest


def _rename(rest: dict[str, Any], names: tuple[str, ...], name: str, result: Translation) -> None:
    """Puts the value of other names of a field under `name`; they must agree."""
    given = {one: rest.pop(one) for one in (*names, name) if one in rest}
    values = {one: value for one, value in given.items() if value is not None}
    if len(set(map(str, values.values()))) > 1:
        result.problems.append(f"{' and '.join(values)} are one field, and differ: make them equal")
    if values:
        rest[name] = next(iter(values.values()))


def _pattern(own: Mapping[str, Any], rest: dict[str, Any], result: Translation) -> str | None:
    """The letters of the layers; `num_hidden_layers` gets their number."""
    kinds, pattern = own["layers_block_type"], own["hybrid_override_pattern"]
    if kinds is not None:
        if not isinstance(kinds, list) or any(kind not in _LETTERS for kind in map(str, kinds)):
            result.problems.append(f"layers_block_type must name {', '.join(_LETTERS)} only")
            return None
        letters = "".join(_LETTERS[kind] for kind in kinds)
        if pattern not in (None, letters):
            result.problems.append("hybrid_override_pattern contradicts layers_block_type: remove one")
        pattern = letters
    if not isinstance(pattern, str) or not pattern or set(pattern) - set("M*-E"):
        result.problems.append(f"hybrid_override_pattern: {pattern!r} must have a letter M, *, - or E per layer")
        return None
    if rest.setdefault("num_hidden_layers", len(pattern)) != len(pattern):
        text = f"num_hidden_layers: {rest['num_hidden_layers']!r} contradicts the {len(pattern)} layers of the pattern"
        result.problems.append(text)
    if "M" not in pattern:
        result.problems.append("hybrid_override_pattern has no M: models without Mamba layers are not supported")
    return pattern


def _mixture(own: Mapping[str, Any], pattern: str, result: Translation) -> dict[str, Any]:
    moe = {
        "router_score_function": "sigmoid",
        "router_expert_bias": True,
        "router_dtype": "fp32",
        "layer_freq": [int(kind == "E") for kind in pattern],
        **{ours: own[name] for name, (ours, _) in _EXPERTS.items()},
    }
    if own["norm_topk_prob"] is not True or own["num_experts_per_tok"] == 1:
        result.problems.append(
            "norm_topk_prob: false, or num_experts_per_tok: 1, is not supported: Megatron-Core makes the weights of "
            "several experts sum to one, and not the weight of one"
        )
    translate_groups(own, moe, result)
    return moe
