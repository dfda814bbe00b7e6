"""Translates the fields of a `config.json` for RoPE, mixtures of experts, and layers with one part each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from roll_batching.huggingface.families import Family


@dataclass
class Translation:
    """The architecture that a `config.json` describes, and what is wrong with it."""

    family: Family | None = None
    architecture: dict[str, Any] = field(default_factory=dict)
    """Settings of `model_args.architecture`; complete only without problems."""
    problems: list[str] = field(default_factory=list)
    """One error per field that is missing or not supported; each names its field."""


# ---- RoPE

_ORIGINAL = "original_max_position_embeddings"
_NEEDED: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL),
    "yarn": ("factor", _ORIGINAL),
}
"""Parameters of each kind of RoPE."""
_YARN = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate")
"""Parameters of YaRN that may be absent."""


def translate_rope(values: Mapping[str, Any], base: Any, share: Any, result: Translation) -> None:
    """Translates RoPE as transformers 4 (`rope_theta`, `rope_scaling`) or 5 (`rope_parameters`) writes it.

    `base` is `rope_theta` and `share` is `partial_rotary_factor`, or the family's defaults.
    """
    name = "rope_parameters" if values.get("rope_parameters") is not None else "rope_scaling"
    section = values.get(name)
    rope = dict(section) if isinstance(section, Mapping) else {}
    older = values.get("rope_scaling")
    if older is not None and older not in (section, {key: rope[key] for key in rope if key != "rope_theta"}):
        result.problems.append(f"rope_scaling: {older!r} contradicts rope_parameters; leave one of them out")
    if section is not None and not isinstance(section, Mapping):
        result.problems.append(f"{name}: {section!r} is not supported: it must be an object")
    theta = values.get("rope_theta")
    if theta is not None and rope.get("rope_theta", theta) != theta:
        other = f"{name}.rope_theta: {rope['rope_theta']!r}"
        result.problems.append(f"rope_theta: {theta!r} contradicts {other}; leave one of them out")
    result.architecture["rotary_base"] = rope.pop("rope_theta", base)
    kinds = [rope.pop(key) for key in ("rope_type", "type") if key in rope]
    kind = kinds[0] if kinds else "default"
    inner = rope.pop("partial_rotary_factor", share)
    if inner != share and (share == 1.0 or values.get("partial_rotary_factor") is not None):
        outer = f"partial_rotary_factor: {share!r}"
        result.problems.append(f"{name}.partial_rotary_factor: {inner!r} is not supported beside {outer}")
    if inner != 1.0:
        result.architecture["rotary_percent"] = inner
    if kind not in _NEEDED:
        result.problems.append(f"{name}.rope_type {kind!r} is not supported, only {', '.join(_NEEDED)}")
        return
    needed = _NEEDED[kind]
    optional = _YARN if kind == "yarn" else ()
    if kind == "yarn" and rope.get("factor") is None:
        longest, original = values.get("max_position_embeddings"), rope.get("original_max_position_embeddings")
        if isinstance(longest, int) and isinstance(original, int) and original > 0:
            rope["factor"] = longest / original
    missing = [key for key in needed if rope.get(key) is None]
    result.problems += [f"{name}.{key} is missing" for key in missing]
    result.problems += [
        f"{name}.{key} has no effect with rope_type {kind}" for key in rope if key not in (*needed, *optional)
    ]
    if needed and not missing:
        scaling = {key: rope[key] for key in (*needed, *optional) if rope.get(key) is not None}
        result.architecture["rope_scaling"] = {"type": kind, **scaling}


_KINDS = ("full_attention", "sliding_attention")
"""Kinds of layers in `rope_parameters` of families whose layers with a window have RoPE of their own."""


def translate_two_ropes(config: Mapping[str, Any], values: Mapping[str, Any], result: Translation) -> None:
    """Translates RoPE of layers without and with a window, as transformers 4 (`rope_local_base_freq`) or 5 writes it.

    `values` is `config` with the family's defaults.
    """
    section = config.get("rope_parameters")
    full: dict[str, Any] = {"rope_theta": values["rope_theta"], **(config.get("rope_scaling") or {})}
    local: dict[str, Any] = {"rope_theta": values["rope_local_base_freq"]}
    if section is not None:
        wrong = not isinstance(section, Mapping) or set(section) - set(_KINDS)
        if wrong or not all(isinstance(parameters, Mapping | None) for parameters in section.values()):
            result.problems.append(f"rope_parameters: {section!r} must be an object of {' and '.join(_KINDS)}")
            return
        for name, key, parts in (("rope_theta", _KINDS[0], full), ("rope_local_base_freq", _KINDS[1], local)):
            parameters = section.get(key) or {}
            older = {**({"rope_theta": config[name]} if config.get(name) is not None else {})}
            older |= (config.get("rope_scaling") or {}) if parts is full else {}
            if any(part in parameters and parameters[part] != value for part, value in older.items()):
                result.problems.append(f"rope_parameters.{key} contradicts {older!r}; leave one of them out")
            parts.update(parameters)
    rest = {name: value for name, value in config.items() if name not in ("rope_theta", "rope_scaling")}
    translate_rope({**rest, "rope_parameters": full}, values["rope_theta"], 1.0, result)
    if local.pop("rope_type", "default") != "default" or set(local) != {"rope_theta"}:
        problem = (
            f"rope_parameters.sliding_attention: {section and section.get('sliding_attention')!r} is not supported"
        )
        result.problems.append(f"{problem}: only rope_theta of the default rope_type")
    result.architecture["rotary_local_base"] = local["rope_theta"]


# ---- mixtures of experts


def translate_experts(values: Mapping[str, Any], family: Family, result: Translation) -> None:
    """Translates the experts of Mixtral, Qwen3-MoE and others whose router is a softmax."""
    moe: dict[str, Any] = dict(family.router)
    names = {"num_local_experts": "num_experts", "num_experts_per_tok": "router_topk"}
    if family.experts_share_ffn:
        names["intermediate_size"] = "ffn_hidden_size"
    else:
        names["moe_intermediate_size"] = "ffn_hidden_size"
    values = {"num_local_experts": values.get("num_experts"), **values}
    for name, ours in names.items():
        if values.get(name) is None:
            result.problems.append(f"{name} is missing")
        else:
            moe[ours] = values[name]
    if values.get("output_router_logits"):
        result.problems.append(
            "output_router_logits: true is not supported: set it to false, and moe.aux_loss_coeff in the architecture "
            "for a load-balancing loss"
        )
    moe["router_pre_softmax"] = not (family.normalised_experts or values["norm_topk_prob"])
    if moe.get("router_topk") == 1 and not moe["router_pre_softmax"]:
        result.problems.append(
            "num_experts_per_tok: 1 with norm_topk_prob gives every token the weight 1: the router would not be trained"
        )
    layers = values.get("num_hidden_layers")
    if not family.experts_share_ffn and isinstance(layers, int):
        dense, step = set(values["mlp_only_layers"] or ()), values["decoder_sparse_step"]
        pattern = [int(layer not in dense and (layer + 1) % step == 0) for layer in range(layers)]
        if not any(pattern):
            result.problems.append("mlp_only_layers and decoder_sparse_step leave no mixture-of-experts layer")
        if not all(pattern):
            moe["layer_freq"] = pattern
    if family.shared_expert:
        width = values.get("shared_expert_intermediate_size")
        if width is None:
            result.problems.append("shared_expert_intermediate_size is missing")
        moe |= {"shared_expert_ffn_hidden_size": width, "shared_expert_gate": True}
    elif values.get("shared_expert_intermediate_size"):
        result.problems.append(f"shared_expert_intermediate_size has no effect with model_type {family.model_type}")
    result.architecture["moe"] = moe


def translate_sigmoid_experts(values: Mapping[str, Any], result: Translation) -> None:
    """Translates the experts of DeepSeek-V3, GLM-4.5 and others with its router."""
    values = {"num_local_experts": values.get("n_routed_experts"), **values}
    moe: dict[str, Any] = {
        "router_score_function": "sigmoid",
        "router_expert_bias": True,
        "router_dtype": "fp32",
        "router_scaling_factor": values["routed_scaling_factor"],
    }
    names = {"num_local_experts": "num_experts", "num_experts_per_tok": "router_topk"}
    for name, ours in (names | {"moe_intermediate_size": "ffn_hidden_size"}).items():
        if values.get(name) is None:
            result.problems.append(f"{'n_routed_experts' if name == 'num_local_experts' else name} is missing")
        else:
            moe[ours] = values[name]
    if values["norm_topk_prob"] is not True or values.get("num_experts_per_tok") == 1:
        result.problems.append(
            "norm_topk_prob: false, or num_experts_per_tok: 1, is not supported: Megatron-Core makes the weights of "
            "several experts sum to one, and not the weight of one"
        )
    shared, width = values["n_shared_experts"], values.get("moe_intermediate_size")
    if isinstance(shared, int) and isinstance(width, int):
        if shared < 1:
            result.problems.append(f"n_shared_experts: {shared!r} is not supported, it must be at least 1")
        moe["shared_expert_ffn_hidden_size"] = shared * width
    for name in ("num_nextn_predict_layers", "num_mtp_layers"):
        if not isinstance(values.get(name) or 0, int):
            result.problems.append(f"{name}: {values[name]!r} is not supported, it must be a number")
    if values.get("output_router_logits"):
        result.problems.append("output_router_logits: true is not supported: set it to false")
    translate_groups(values, moe, result)
    dense, layers = values["first_k_dense_replace"], values.get("num_hidden_layers")
    if (kinds := values.get("mlp_layer_types")) is not None:  # precedes first_k_dense_replace, as in transformers
        if not isinstance(kinds, list) or set(kinds) - {"dense", "sparse"} or len(kinds) != layers:
            result.problems.append(f"mlp_layer_types must name dense or sparse for each of {layers} layers")
        elif "sparse" not in kinds:
            result.problems.append("mlp_layer_types leaves no mixture-of-experts layer")
        else:
            moe["layer_freq"] = [int(kind == "sparse") for kind in kinds]
    elif isinstance(dense, int) and isinstance(layers, int):
        if dense >= layers:
            result.problems.append(f"first_k_dense_replace: {dense} leaves no mixture-of-experts layer")
        elif dense > 0:
            moe["layer_freq"] = [int(layer >= dense) for layer in range(layers)]
    result.architecture["moe"] = moe


def translate_groups(values: Mapping[str, Any], moe: dict[str, Any], result: Translation) -> None:
    """Translates the choice of groups of experts, which has no effect where all groups are chosen."""
    groups, chosen, topk = values["n_group"], values["topk_group"], values.get("num_experts_per_tok")
    if groups == chosen or not all(isinstance(number, int) for number in (groups, chosen, topk)):
        return
    # transformers ranks groups by their two best experts, Megatron by their best topk / chosen.
    if chosen < 1 or topk != 2 * chosen:
        result.problems.append(
            f"topk_group: {chosen!r} is not supported with num_experts_per_tok: {topk!r}: Megatron-Core ranks groups "
            "by their best num_experts_per_tok / topk_group experts, and the model by their best two"
        )
    moe |= {"router_num_groups": groups, "router_group_topk": chosen}


# ---- layers with one part each


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
    fields = {**_DEFAULTS, **{name: value for name, value in config.items() if name in _DEFAULTS}}
    rest = {name: value for name, value in config.items() if name not in _DEFAULTS and name not in _WITHOUT_EFFECT}
    _rename(rest, ("layer_norm_epsilon", "norm_eps"), "rms_norm_eps", result)
    _rename(rest, ("attention_head_dim",), "head_dim", result)
    pattern = _pattern(fields, rest, result)
    if fields["time_step_limit"] not in (None, [0.0, float("inf")], [0.0, {"__float__": "Infinity"}]):
        result.problems.append(
            f"time_step_limit: {fields['time_step_limit']!r} is not supported, only [0.0, Infinity]: time steps have "
            "no other limits in Megatron-Core"
        )
    if pattern is None:
        return rest
    hybrid = {"pattern": pattern, **{ours: fields[name] for name, (ours, _) in _MAMBA.items()}}
    if "E" in pattern:
        hybrid["moe_latent_size"] = fields["moe_latent_size"]
        result.architecture["moe"] = _mixture(fields, pattern, result)
    result.architecture["hybrid"] = hybrid
    return rest


def _rename(rest: dict[str, Any], names: tuple[str, ...], name: str, result: Translation) -> None:
    """Moves the value of a field from its other `names` in `rest` to `name`; if several are set, they must agree."""
    given = {alias: rest.pop(alias) for alias in (*names, name) if alias in rest}
    values = {alias: value for alias, value in given.items() if value is not None}
    if len(set(map(str, values.values()))) > 1:
        result.problems.append(f"{' and '.join(values)} are one field, and differ: make them equal")
    if values:
        rest[name] = next(iter(values.values()))


def _pattern(hybrid: Mapping[str, Any], rest: dict[str, Any], result: Translation) -> str | None:
    """The letters of the layers; `num_hidden_layers` gets their number."""
    kinds, pattern = hybrid["layers_block_type"], hybrid["hybrid_override_pattern"]
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
        problem = (
            f"num_hidden_layers: {rest['num_hidden_layers']!r} contradicts the {len(pattern)} layers of the pattern"
        )
        result.problems.append(problem)
    if "M" not in pattern:
        result.problems.append("hybrid_override_pattern has no M: models without Mamba layers are not supported")
    return pattern


def _mixture(hybrid: Mapping[str, Any], pattern: str, result: Translation) -> dict[str, Any]:
    moe = {
        "router_score_function": "sigmoid",
        "router_expert_bias": True,
        "router_dtype": "fp32",
        "layer_freq": [int(kind == "E") for kind in pattern],
        **{ours: hybrid[name] for name, (ours, _) in _EXPERTS.items()},
    }
    if hybrid["norm_topk_prob"] is not True or hybrid["num_experts_per_tok"] == 1:
        result.problems.append(
            "norm_topk_prob: false, or num_experts_per_tok: 1, is not supported: Megatron-Core makes the weights of "
            "several experts sum to one, and not the weight of one"
        )
    translate_groups(hybrid, moe, result)
    return moe
