"""`config.json` of a model directory as the settings of `model_args.architecture`: every field honoured, or refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from roll_batching.huggingface.families import (
    ALWAYS,
    EXPERTS,
    FAMILIES,
    OPTIONAL,
    RENAMED,
    ROPE,
    SLIDING,
    WITHOUT_EFFECT,
    Family,
)

_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass
class Translation:
    """What a `config.json` comes to."""

    family: Family | None = None
    architecture: dict[str, Any] = field(default_factory=dict)
    """In the names of `model_args.architecture`; whole only without problems."""
    problems: list[str] = field(default_factory=list)
    """Every field that is missing or refused, each named."""


def translate(config: Mapping[str, Any]) -> Translation:
    """The architecture that `config`, the content of a `config.json`, describes. Reads nothing, raises nothing."""
    found = Translation()
    known = ", ".join(FAMILIES)
    found.family = FAMILIES.get(str(config.get("model_type")))
    if found.family is None:
        found.problems.append(f"model_type {config.get('model_type')!r} is not supported: the families are {known}")
        return found
    family = found.family
    classes = config.get("architectures")
    if classes is not None and classes != [family.architecture]:
        found.problems.append(f"architectures {classes} is not supported: only {family.architecture} is trained")
    values = {**family.defaults, **config}
    _renamed(values, found)
    _rope(config, values["rope_theta"], found)
    if family.windows:
        _window(values, found)
    if family.mixture:
        _experts(values, found)
    known_fields = {*RENAMED, *ROPE, *ALWAYS, *WITHOUT_EFFECT}
    known_fields |= set(SLIDING if family.windows else ()) | set(EXPERTS if family.mixture else ())
    for name, value in values.items():
        if name in ALWAYS and value is not None and value != ALWAYS[name]:
            found.problems.append(f"{name}: {value!r} is not supported, only {ALWAYS[name]!r}")
        elif name not in known_fields and value is not None:
            found.problems.append(f"{name}: {value!r} is no field that is known of model_type {family.model_type}")
    found.architecture |= {"add_qkv_bias": family.add_qkv_bias, "qk_layernorm": family.qk_layernorm}
    return found


def stored_dtype(config: Mapping[str, Any]) -> str | None:
    """The precision of the directory's tensors as `config.json` names it, in torch's words; None: it does not."""
    return config.get("dtype", config.get("torch_dtype"))


def _renamed(values: Mapping[str, Any], found: Translation) -> None:
    for name, ours in RENAMED.items():
        value = values.get(name)
        if value is None:
            if name not in OPTIONAL or name not in values:
                found.problems.append(f"{name} is missing")
            continue
        if isinstance(value, bool) and name != "tie_word_embeddings":
            found.problems.append(f"{name}: {value!r} is not supported, a number is needed")
            continue
        found.architecture[ours] = value


def _rope(values: Mapping[str, Any], base: Any, found: Translation) -> None:
    """Rotation, in the spelling of transformers 4 (`rope_theta`, `rope_scaling`) or 5 (`rope_parameters`).

    `base` is `rope_theta`, or the family's default.
    """
    name = "rope_parameters" if values.get("rope_parameters") is not None else "rope_scaling"
    given = values.get(name)
    rope = dict(given) if isinstance(given, Mapping) else {}
    older = values.get("rope_scaling")
    if older is not None and older not in (given, {key: rope[key] for key in rope if key != "rope_theta"}):
        found.problems.append(
            f"rope_scaling: {older!r} says something else than rope_parameters; leave one of them out"
        )
    if given is not None and not isinstance(given, Mapping):
        found.problems.append(f"{name}: {given!r} is not supported: keys and values are needed")
    theta = values.get("rope_theta")
    if theta is not None and rope.get("rope_theta", theta) != theta:
        other = f"{name}.rope_theta: {rope['rope_theta']!r}"
        found.problems.append(f"rope_theta: {theta!r} says something else than {other}; leave one out")
    found.architecture["rotary_base"] = rope.pop("rope_theta", base)
    kinds = [rope.pop(key) for key in ("rope_type", "type") if key in rope]
    kind = kinds[0] if kinds else "default"
    if rope.pop("partial_rotary_factor", 1.0) != 1.0:
        found.problems.append(f"{name}.partial_rotary_factor is not supported, only 1.0")
    if kind == "default":
        needed: tuple[str, ...] = ()
    elif kind == "linear":
        needed = ("factor",)
    elif kind == "llama3":
        needed = _LLAMA3
    else:
        found.problems.append(f"{name}.rope_type {kind!r} is not supported, only default, linear and llama3")
        return
    missing = [key for key in needed if key not in rope]
    found.problems += [f"{name}.{key} is missing" for key in missing]
    found.problems += [f"{name}.{key} means nothing with rope_type {kind}" for key in rope if key not in needed]
    if needed and not missing:
        found.architecture["rope_scaling"] = {"type": kind, **{key: rope[key] for key in needed}}


def _window(values: Mapping[str, Any], found: Translation) -> None:
    window, layers = values.get("sliding_window"), values.get("num_hidden_layers")
    kinds = values.get("layer_types")
    first = (values.get("max_window_layers") or 0) if found.family and not found.family.mixture else 0
    windowed = bool(values.get("use_sliding_window")) and isinstance(layers, int) and first < layers
    if kinds is not None and isinstance(layers, int):
        others = sorted({str(kind) for kind in kinds} - {"full_attention", "sliding_attention"})
        if others or len(kinds) != layers:
            found.problems.append(f"layer_types must name full_attention or sliding_attention for {layers} layers")
        slides = "sliding_attention" in kinds
        if windowed and window is not None and not slides:
            text = "use_sliding_window: true says something else than layer_types, full_attention alone"
            found.problems.append(f"{text}; set it to false, or name sliding_attention for the layers with a window")
    elif "use_sliding_window" in values:
        slides = windowed
    else:
        slides = True
    if slides and window is not None:
        longest = values.get("max_position_embeddings")
        if not (isinstance(longest, int) and longest <= window):
            found.architecture["sliding_window"] = window


def _experts(values: Mapping[str, Any], found: Translation) -> None:
    assert found.family is not None
    moe: dict[str, Any] = {}
    names = {"num_local_experts": "num_experts", "num_experts_per_tok": "router_topk"}
    if found.family.experts_share_ffn:
        names["intermediate_size"] = "ffn_hidden_size"
    else:
        names["moe_intermediate_size"] = "ffn_hidden_size"
    values = {"num_local_experts": values.get("num_experts"), **values}
    for name, ours in names.items():
        if values.get(name) is None:
            found.problems.append(f"{name} is missing")
        else:
            moe[ours] = values[name]
    if values.get("output_router_logits"):
        found.problems.append(
            "output_router_logits: true is not supported: set it to false, and moe.aux_loss_coeff in the architecture "
            "for a load-balancing loss"
        )
    moe["router_pre_softmax"] = not (found.family.normalised_experts or values["norm_topk_prob"])
    if moe.get("router_topk") == 1 and not moe["router_pre_softmax"]:
        found.problems.append("num_experts_per_tok: 1 with normalised weights of experts would train no router")
    layers = values.get("num_hidden_layers")
    if not found.family.experts_share_ffn and isinstance(layers, int):
        dense, step = set(values["mlp_only_layers"] or ()), values["decoder_sparse_step"]
        pattern = [int(layer not in dense and (layer + 1) % step == 0) for layer in range(layers)]
        if not any(pattern):
            found.problems.append("mlp_only_layers and decoder_sparse_step leave no layer of experts")
        if not all(pattern):
            moe["layer_freq"] = pattern
    found.architecture["moe"] = moe
