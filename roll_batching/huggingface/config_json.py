"""Translates a `config.json` into `model_args.architecture`; every field is translated or is an error."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roll_batching.errors import ConfigError
from roll_batching.huggingface.directory import CONFIG, read_json
from roll_batching.huggingface.families import Family, load_family
from roll_batching.huggingface.field_translation import (
    Translation,
    translate_experts,
    translate_rope,
    translate_sigmoid_experts,
    translate_two_ropes,
)
from roll_batching.huggingface.fields import (
    ALWAYS,
    BESIDE_TEXT,
    DELTA_NET_FIELDS,
    EXPERTS,
    IMAGE_AXES,
    LATENT_ATTENTION,
    LAYER_KINDS,
    LOCAL_ROPE,
    NEXT_TOKENS,
    OPTIONAL,
    RENAMED,
    ROPE,
    SIGMOID_EXPERTS,
    SLIDING,
    WITHOUT_EFFECT,
)


def translate(config: Mapping[str, Any], own_family: str | None = None, *, vision_encoder: bool = False) -> Translation:
    """The architecture that `config`, the content of a `config.json`, describes.

    `own_family` is `ModelArgs.family`, `vision_encoder` as there. Errors go to `Translation.problems`.
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
    if family.encoder is not None and (vision_encoder or not family.encoder.on_request):
        from roll_batching.huggingface.vision_families import translate_vision  # few families need it

        config = translate_vision(config, family, result)
    if family.text_model is not None:
        config = _text_config(config, family, result)
    if family.image_axes and isinstance(config.get("rope_parameters"), Mapping):
        rope = {name: value for name, value in config["rope_parameters"].items() if name not in IMAGE_AXES}
        config = {**config, "rope_parameters": rope}
    if family.hybrid:
        from roll_batching.huggingface.field_translation import translate_hybrid  # one family needs it

        config = translate_hybrid(config, result)
    if family.rewrite is not None:
        config = family.rewrite(config, result.problems)
    values = {**family.defaults, **config}
    _translate_renamed(values, family, result)
    share = values["partial_rotary_factor"] if family.partial_rope else 1.0
    if family.local_rope:
        translate_two_ropes(config, values, result)
    else:
        translate_rope(config, values["rope_theta"], share, result)
    if family.windows:
        _translate_window(values, family, result)
    if family.sigmoid_routing:
        translate_sigmoid_experts(values, result)
    elif family.mixture:
        translate_experts(values, family, result)
    if family.delta_net:
        _translate_delta_net(values, result)
    if family.latent_attention:
        _translate_latent_attention(values, result)
    family_keys = {*family.numbers, *family.switches, *(("partial_rotary_factor",) if family.partial_rope else ())}
    always = {name: value for name, value in {**ALWAYS, **family.always}.items() if name not in family_keys}
    known_fields = {*RENAMED, *ROPE, *always, *WITHOUT_EFFECT, *family_keys}
    known_fields |= set(SLIDING if family.windows else ())
    known_fields |= {*DELTA_NET_FIELDS, *LAYER_KINDS, *NEXT_TOKENS} if family.delta_net else set()
    known_fields |= set(LOCAL_ROPE if family.local_rope else ())
    known_fields |= set(LATENT_ATTENTION if family.latent_attention else ())
    known_fields |= set(SIGMOID_EXPERTS if family.sigmoid_routing else EXPERTS if family.mixture else ())
    for name, value in values.items():
        if name in always and value is not None and value != always[name]:
            result.problems.append(f"{name}: {value!r} is not supported, only {always[name]!r}")
        elif name not in known_fields and value is not None:
            result.problems.append(f"{name}: {value!r} is an unknown field of model_type {family.model_type}")
    result.architecture |= {"add_qkv_bias": family.add_qkv_bias, "qk_layernorm": family.qk_layernorm}
    result.architecture |= family.settings
    for name, ours in family.numbers.items():
        value = values.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            result.problems.append(f"{name}: {value!r} is not supported, it must be a number")
        result.architecture[ours] = value
    for name, ours in family.switches.items():
        if not isinstance(values[name], bool):
            result.problems.append(f"{name}: {values[name]!r} is not supported, it must be true or false")
        result.architecture[ours] = values[name]
    return result


def translate_directory(path: Path, own_family: str | None = None, *, vision_encoder: bool = False) -> Translation:
    """The architecture that a model directory describes, with its image processor's numbers. Raises `ConfigError`."""
    translation = translate(read_json(path / CONFIG), own_family, vision_encoder=vision_encoder)
    if "vision" in translation.architecture:
        from roll_batching.huggingface.vision_families import add_preprocessing  # as above

        translation.problems += add_preprocessing(path, translation.architecture)
    return translation


def stored_dtype(config: Mapping[str, Any]) -> str | None:
    """Precision of the directory's tensors by its name in torch, such as "bfloat16"; None if `config.json` has none."""
    text_config = config.get("text_config")
    inner = text_config if isinstance(text_config, Mapping) else {}
    return config.get("dtype", config.get("torch_dtype", inner.get("dtype", inner.get("torch_dtype"))))


def _text_config(config: Mapping[str, Any], family: Family, result: Translation) -> Mapping[str, Any]:
    """Fields of the text model in a `config.json` that also describes a vision encoder; adds problems to `result`."""
    text_config = config.get("text_config")
    if not isinstance(text_config, Mapping):
        result.problems.append(f"text_config: {text_config!r} must be an object, the text model of {family.model_type}")
        return {}
    if text_config.get("model_type", family.text_model) != family.text_model:
        model_type = text_config.get("model_type")
        result.problems.append(f"text_config.model_type: {model_type!r} is not supported, only {family.text_model!r}")
    for name in sorted(set(config) - BESIDE_TEXT - WITHOUT_EFFECT):
        supported = ALWAYS.get(name, object())
        if config[name] is not None and config[name] != supported:
            result.problems.append(f"{name}: {config[name]!r} is an unknown field of model_type {family.model_type}")
    ties = [
        section["tie_word_embeddings"]
        for section in (text_config, config)
        if section.get("tie_word_embeddings") is not None
    ]
    if len(ties) == 2 and ties[0] != ties[1]:
        result.problems.append("tie_word_embeddings contradicts text_config.tie_word_embeddings; make them equal")
    return {**text_config, **({"tie_word_embeddings": ties[0]} if ties else {})}


def _translate_renamed(values: Mapping[str, Any], family: Family, result: Translation) -> None:
    for name, ours in RENAMED.items():
        value = values.get(name)
        if value is None:
            by_default = name in family.defaults and family.defaults[name] is None
            if not by_default and (name not in OPTIONAL or name not in values):
                result.problems.append(f"{name} is missing")
            continue
        if isinstance(value, bool) and name != "tie_word_embeddings":
            result.problems.append(f"{name}: {value!r} is not supported, it must be a number")
            continue
        result.architecture[ours] = value


def _translate_window(values: Mapping[str, Any], family: Family, result: Translation) -> None:
    """Translates the sliding window, and the layers that have it."""
    window, layers = values.get("sliding_window"), values.get("num_hidden_layers")
    kinds = values.get("layer_types")
    if family.local_rope and kinds is None and isinstance(layers, int):
        kinds = _kinds_of_pattern(values, layers, result)
    if family.needs_layer_types and kinds is None:
        result.problems.append("layer_types is missing")
    # In transformers, Qwen2 and Qwen3 slide from layer max_window_layers on; Qwen3-MoE and Mixtral in every layer.
    first = (values.get("max_window_layers") or 0) if not family.mixture else 0
    windowed = bool(values.get("use_sliding_window")) and isinstance(layers, int) and first < layers
    if kinds is not None and isinstance(layers, int):
        unknown_kinds = sorted({str(kind) for kind in kinds} - {"full_attention", "sliding_attention"})
        if unknown_kinds or len(kinds) != layers:
            result.problems.append(
                f"layer_types must name full_attention or sliding_attention for each of {layers} layers"
            )
        pattern = [int(kind == "sliding_attention") for kind in kinds]
        slides = any(pattern)
        if windowed and window is not None and not slides:
            problem = "use_sliding_window: true contradicts layer_types, which are all full_attention"
            result.problems.append(
                f"{problem}; set it to false, or name sliding_attention for the layers with a window"
            )
    elif "use_sliding_window" in values:
        slides, pattern = windowed, [int(layer >= first) for layer in range(layers if isinstance(layers, int) else 0)]
    else:
        slides, pattern = True, []
    if slides and window is not None:
        longest = values.get("max_position_embeddings")
        if family.local_rope or not (isinstance(longest, int) and longest <= window):
            result.architecture["sliding_window"] = window
            if not all(pattern):
                result.architecture["window_layers"] = pattern
    elif family.local_rope:
        result.architecture.pop("rotary_local_base", None)  # no layer has it


def _kinds_of_pattern(values: Mapping[str, Any], layers: int, result: Translation) -> list[str] | None:
    """Attention kind of each layer by Gemma's `sliding_window_pattern` n: each n-th layer has no window."""
    name = "sliding_window_pattern" if "sliding_window_pattern" in values else "_sliding_window_pattern"
    every = values.get(name, 6)
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        result.problems.append(f"{name}: {every!r} is not supported, it must be a positive number of layers")
        return None
    return ["sliding_attention" if (layer + 1) % every else "full_attention" for layer in range(layers)]


def _translate_delta_net(values: Mapping[str, Any], result: Translation) -> None:
    """Translates gated delta nets, and the layers that have them."""
    missing = [name for name in DELTA_NET_FIELDS if values.get(name) is None]
    result.problems += [f"{name} is missing" for name in missing]
    if values.get("use_sliding_window"):
        result.problems.append("use_sliding_window: true is not supported beside gated delta nets: set it to false")
    layers, kinds = values.get("num_hidden_layers"), values.get("layer_types")
    every = values.get("full_attention_interval", 4)
    if kinds is None and isinstance(layers, int):
        if isinstance(every, bool) or not isinstance(every, int) or every < 2:
            problem = "is not supported, it must be a number of layers above 1"
            result.problems.append(f"full_attention_interval: {every!r} {problem}")
            return
        kinds = ["linear_attention" if (layer + 1) % every else "full_attention" for layer in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or set(kinds) != {"linear_attention", "full_attention"}:
        problem = f"layer_types must name linear_attention or full_attention, and both, for each of {layers} layers"
        result.problems.append(problem)
    elif not missing:
        result.architecture["gated_delta_net"] = {
            "layers": [int(kind == "linear_attention") for kind in kinds],
            **{ours: values[name] for name, ours in DELTA_NET_FIELDS.items()},
        }


_LATENT = {
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_head_dim",
    "qk_rope_head_dim": "qk_pos_emb_head_dim",
    "v_head_dim": "v_head_dim",
}
"""Fields of multi-latent attention, and their names in `architecture.multi_latent_attention`."""


def _translate_latent_attention(values: Mapping[str, Any], result: Translation) -> None:
    missing = [name for name in _LATENT if values.get(name) is None]
    result.problems += [f"{name} is missing" for name in missing]
    if "q_lora_rank" not in values:
        result.problems.append("q_lora_rank is missing: give a number, or null for queries without a latent")
    if not isinstance(values["rope_interleave"], bool):
        result.problems.append(f"rope_interleave: {values['rope_interleave']!r} must be true or false")
    if missing:
        return
    latent = {ours: values[name] for name, ours in _LATENT.items()}
    # transformers 5 writes the rotated channels as head_dim, and their sum with the others as qk_head_dim.
    if values.get("head_dim") not in (None, latent["qk_pos_emb_head_dim"]):
        result.problems.append(f"head_dim: {values['head_dim']!r} is not supported, only that of qk_rope_head_dim")
    widths = values["qk_nope_head_dim"], values["qk_rope_head_dim"]
    if values.get("qk_head_dim") is not None and all(isinstance(width, int) for width in widths):
        if values["qk_head_dim"] != sum(widths):
            result.problems.append(f"qk_head_dim: {values['qk_head_dim']!r} is not qk_nope_head_dim + qk_rope_head_dim")
    heads = values.get("num_key_value_heads")
    if heads not in (None, values.get("num_attention_heads")):
        result.problems.append(f"num_key_value_heads: {heads!r} has no effect here: it must be num_attention_heads")
    result.architecture.pop("kv_channels", None)
    result.architecture["multi_latent_attention"] = {
        **latent,
        "q_lora_rank": values.get("q_lora_rank"),
        "rotary_interleaved": values["rope_interleave"],
    }
