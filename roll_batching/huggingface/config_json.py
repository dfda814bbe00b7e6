"""Translates a `config.json` into `model_args.architecture`; every field is translated or is an error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from roll_batching.errors import ConfigError
from roll_batching.huggingface.families import (
    ALWAYS,
    EXPERTS,
    OPTIONAL,
    RENAMED,
    ROPE,
    SIGMOID_EXPERTS,
    SLIDING,
    WITHOUT_EFFECT,
    Family,
    load_family,
)

_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass
class Translation:
    """The result of translating a `config.json`."""

    family: Family | None = None
    architecture: dict[str, Any] = field(default_factory=dict)
    """Settings of `model_args.architecture`; complete only without problems."""
    problems: list[str] = field(default_factory=list)
    """One error per field that is missing or not supported; each names its field."""


def translate(config: Mapping[str, Any], own_family: str | None = None) -> Translation:
    """The architecture that `config`, the content of a `config.json`, describes.

    `own_family` is the dotted path of a family of the caller's (`load_family`). Errors go to `Translation.problems`.
    """
    result = Translation()
    try:
        family = result.family = load_family(config.get("model_type"), own_family)
    except ConfigError as error:
        result.problems.append(str(error))
        return result
    classes = config.get("architectures")
    if classes is not None and classes != [family.architecture]:
        result.problems.append(f"architectures {classes} is not supported: only {family.architecture} is trained")
    values = {**family.defaults, **config}
    _translate_renamed(values, result)
    _translate_rope(config, values["rope_theta"], values["partial_rotary_factor"] if family.partial_rope else 1.0, result)
    if family.windows:
        _translate_window(values, family, result)
    if family.sigmoid_routing:
        _translate_sigmoid_experts(values, result)
    elif family.mixture:
        _translate_experts(values, family, result)
    own = {*family.switches, *(("partial_rotary_factor",) if family.partial_rope else ())}
    always = {name: value for name, value in {**ALWAYS, **family.always}.items() if name not in own}
    known_fields = {*RENAMED, *ROPE, *always, *WITHOUT_EFFECT, *own}
    known_fields |= set(SLIDING if family.windows else ())
    known_fields |= set(SIGMOID_EXPERTS if family.sigmoid_routing else EXPERTS if family.mixture else ())
    for name, value in values.items():
        if name in always and value is not None and value != always[name]:
            result.problems.append(f"{name}: {value!r} is not supported, only {always[name]!r}")
        elif name not in known_fields and value is not None:
            result.problems.append(f"{name}: {value!r} is an unknown field of model_type {family.model_type}")
    result.architecture |= {"add_qkv_bias": family.add_qkv_bias, "qk_layernorm": family.qk_layernorm}
    for name, ours in family.switches.items():
        if not isinstance(values[name], bool):
            result.problems.append(f"{name}: {values[name]!r} is not supported, it must be true or false")
        result.architecture[ours] = values[name]
    return result


def stored_dtype(config: Mapping[str, Any]) -> str | None:
    """Precision of the directory's tensors by its name in torch, such as "bfloat16"; None if `config.json` has none."""
    return config.get("dtype", config.get("torch_dtype"))


def _translate_renamed(values: Mapping[str, Any], result: Translation) -> None:
    for name, ours in RENAMED.items():
        value = values.get(name)
        if value is None:
            if name not in OPTIONAL or name not in values:
                result.problems.append(f"{name} is missing")
            continue
        if isinstance(value, bool) and name != "tie_word_embeddings":
            result.problems.append(f"{name}: {value!r} is not supported, it must be a number")
            continue
        result.architecture[ours] = value


def _translate_rope(values: Mapping[str, Any], base: Any, share: Any, result: Translation) -> None:
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
        known = f"partial_rotary_factor: {share!r}"
        result.problems.append(f"{name}.partial_rotary_factor: {inner!r} is not supported beside {known}")
    if inner != 1.0:
        result.architecture["rotary_percent"] = inner
    if kind == "default":
        needed: tuple[str, ...] = ()
    elif kind == "linear":
        needed = ("factor",)
    elif kind == "llama3":
        needed = _LLAMA3
    else:
        result.problems.append(f"{name}.rope_type {kind!r} is not supported, only default, linear and llama3")
        return
    missing = [key for key in needed if key not in rope]
    result.problems += [f"{name}.{key} is missing" for key in missing]
    result.problems += [f"{name}.{key} has no effect with rope_type {kind}" for key in rope if key not in needed]
    if needed and not missing:
        result.architecture["rope_scaling"] = {"type": kind, **{key: rope[key] for key in needed}}


def _translate_window(values: Mapping[str, Any], family: Family, result: Translation) -> None:
    window, layers = values.get("sliding_window"), values.get("num_hidden_layers")
    kinds = values.get("layer_types")
    # In transformers, Qwen2 and Qwen3 slide from layer max_window_layers on; Qwen3-MoE and Mixtral in every layer.
    first = (values.get("max_window_layers") or 0) if not family.mixture else 0
    windowed = bool(values.get("use_sliding_window")) and isinstance(layers, int) and first < layers
    if kinds is not None and isinstance(layers, int):
        others = sorted({str(kind) for kind in kinds} - {"full_attention", "sliding_attention"})
        if others or len(kinds) != layers:
            result.problems.append(
                f"layer_types must name full_attention or sliding_attention for each of {layers} layers"
            )
        slides = "sliding_attention" in kinds
        if windowed and window is not None and not slides:
            text = "use_sliding_window: true contradicts layer_types, which are all full_attention"
            result.problems.append(f"{text}; set it to false, or name sliding_attention for the layers with a window")
    elif "use_sliding_window" in values:
        slides = windowed
    else:
        slides = True
    if slides and window is not None:
        longest = values.get("max_position_embeddings")
        if not (isinstance(longest, int) and longest <= window):
            result.architecture["sliding_window"] = window


def _translate_experts(values: Mapping[str, Any], family: Family, result: Translation) -> None:
    moe: dict[str, Any] = {}
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
    result.architecture["moe"] = moe


def _translate_sigmoid_experts(values: Mapping[str, Any], result: Translation) -> None:
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
        if values.get(name):
            result.problems.append(
                f"{name}: {values[name]!r} is not supported: multi-token prediction is not trained; set it to 0, and "
                "take the tensors of the layers after num_hidden_layers out of the files"
            )
    if values.get("output_router_logits"):
        result.problems.append("output_router_logits: true is not supported: set it to false")
    _translate_groups(values, moe, result)
    dense, layers = values["first_k_dense_replace"], values.get("num_hidden_layers")
    if isinstance(dense, int) and isinstance(layers, int):
        if dense >= layers:
            result.problems.append(f"first_k_dense_replace: {dense} leaves no mixture-of-experts layer")
        elif dense > 0:
            moe["layer_freq"] = [int(layer >= dense) for layer in range(layers)]
    result.architecture["moe"] = moe


def _translate_groups(values: Mapping[str, Any], moe: dict[str, Any], result: Translation) -> None:
    """Translates the choice of groups of experts, which has no effect where all groups are chosen."""
    groups, chosen, topk = values["n_group"], values["topk_group"], values.get("num_experts_per_tok")
    if groups == chosen or not all(isinstance(one, int) for one in (groups, chosen, topk)):
        return
    # transformers ranks groups by their two best experts, Megatron by their best topk / chosen.
    if chosen < 1 or topk != 2 * chosen:
        result.problems.append(
            f"topk_group: {chosen!r} is not supported with num_experts_per_tok: {topk!r}: Megatron-Core ranks groups "
            "by their best num_experts_per_tok / topk_group experts, and the model by their best two"
        )
    moe |= {"router_num_groups": groups, "router_group_topk": chosen}
