"""Qwen2.5-VL: its `config.json`, and rules for the tensors of its vision encoder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roll_batching.huggingface.family import Family
from roll_batching.huggingface.fields import ALWAYS, BESIDE_TEXT, WITHOUT_EFFECT
from roll_batching.huggingface.tensors import TensorRule


def vision_rules(architecture: Any) -> list[TensorRule]:
    """Rules of the encoder's tensors, whole on every rank and named as in the files."""
    vision, hidden = architecture.vision, architecture.vision.hidden_size
    merged, ffn = hidden * vision.spatial_merge_size**2, vision.intermediate_size
    patch = (hidden, 3, vision.temporal_patch_size, vision.patch_size, vision.patch_size)
    shapes: dict[str, tuple[int, ...]] = {"patch_embed.proj.weight": patch}
    for layer in range(vision.depth):
        shapes |= {
            f"blocks.{layer}.{name}": shape
            for name, shape in (
                ("norm1.weight", (hidden,)),
                ("norm2.weight", (hidden,)),
                ("attn.qkv.weight", (3 * hidden, hidden)),
                ("attn.qkv.bias", (3 * hidden,)),
                ("attn.proj.weight", (hidden, hidden)),
                ("attn.proj.bias", (hidden,)),
                ("mlp.gate_proj.weight", (ffn, hidden)),
                ("mlp.gate_proj.bias", (ffn,)),
                ("mlp.up_proj.weight", (ffn, hidden)),
                ("mlp.up_proj.bias", (ffn,)),
                ("mlp.down_proj.weight", (hidden, ffn)),
                ("mlp.down_proj.bias", (hidden,)),
            )
        }
    shapes |= {
        "merger.ln_q.weight": (hidden,),
        "merger.mlp.0.weight": (merged, merged),
        "merger.mlp.0.bias": (merged,),
        "merger.mlp.2.weight": (architecture.hidden_size, merged),
        "merger.mlp.2.bias": (architecture.hidden_size,),
    }
    return [TensorRule(f"visual.{name}", "copy", ((f"visual.{name}", shape),)) for name, shape in shapes.items()]


QWEN2_5_VL = Family(
    model_type="qwen2_5_vl",
    architecture="Qwen2_5_VLForConditionalGeneration",
    text_model="qwen2_5_vl_text",
    defaults={
        "vocab_size": 152064,
        "hidden_size": 8192,
        "intermediate_size": 29568,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": None,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "use_sliding_window": False,
    },
    add_qkv_bias=True,
    windows=True,
    encoder_rules=vision_rules,
    other_prefixes=(("model.", "model.language_model."), ("visual.", "model.visual.")),
)
"""Files of the hub, and of transformers 5, have `visual.` and `model.`; those of transformers 4.52 and later 4.x
`model.visual.` and `model.language_model.`."""

_TOKENS: Mapping[str, int] = {
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
}
_TOP = {*BESIDE_TEXT, "vision_token_id", "model_type", "architectures", "transformers_version"} - {"initializer_range"}
"""Fields beside the text model's where both are at the top, as on the hub; `vision_token_id` has no effect."""
_SIZES: Mapping[str, Any] = {
    "depth": 32,
    "hidden_size": 3584,
    "intermediate_size": 3420,
    "num_heads": 16,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "window_size": 112,
    "fullatt_block_indexes": (7, 15, 23, 31),
}
"""Fields of `vision_config` with their defaults in transformers, named so in `architecture.vision`, too."""
_ALWAYS: Mapping[str, Any] = {
    **{name: value for name, value in ALWAYS.items() if name != "hidden_act"},
    "hidden_act": "silu",
    "in_channels": 3,
    "in_chans": 3,
    "rope_parameters": {"rope_type": "axial", "rope_theta": 10000.0},
}
_WITHOUT_EFFECT = (*WITHOUT_EFFECT, "tokens_per_second", "spatial_patch_size", "initializer_range")
"""Fields of `vision_config` that images do not need; `tokens_per_second` is for videos."""


def translate_vision(config: Mapping[str, Any], result: Any) -> dict[str, Any]:
    """`config` with the text model in `text_config`; its vision goes into `result.architecture`.

    Without `text_config` the text model's fields are at the top, as on the hub.
    """
    other_fields = dict(config)
    if other_fields.get("text_config") is None:
        text_fields = {name: value for name, value in config.items() if name not in _TOP}
        other_fields = {name: value for name, value in config.items() if name in _TOP and name != "text_config"}
    else:
        text_fields = dict(config["text_config"]) if isinstance(config["text_config"], Mapping) else {}
    other_fields.pop("vision_token_id", None)
    section = None
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(text_fields.get(name), Mapping):
            rope = dict(text_fields[name])
            section = rope.pop("mrope_section", section)
            kinds = {key: "default" for key in ("type", "rope_type") if rope.get(key) == "mrope"}
            text_fields[name] = rope | kinds
    vision = config.get("vision_config")
    if not isinstance(vision, Mapping):
        result.problems.append(f"vision_config: {vision!r} must be an object, the encoder of qwen2_5_vl")
        vision = {}
    for name, value in vision.items():
        if name in _ALWAYS and value is not None and value != _ALWAYS[name]:
            result.problems.append(f"vision_config.{name}: {value!r} is not supported, only {_ALWAYS[name]!r}")
        elif name not in (*_SIZES, *_ALWAYS, *_WITHOUT_EFFECT, "out_hidden_size") and value is not None:
            result.problems.append(f"vision_config.{name}: {value!r} is an unknown field of model_type qwen2_5_vl")
    out, hidden = (
        vision.get("out_hidden_size", 3584),
        text_fields.get("hidden_size", QWEN2_5_VL.defaults["hidden_size"]),
    )
    if out != hidden:
        result.problems.append(f"vision_config.out_hidden_size: {out!r} must be hidden_size of the text, {hidden!r}")
    settings = {name: vision.get(name, default) for name, default in _SIZES.items()}
    settings |= {name: config.get(name, default) for name, default in _TOKENS.items()}
    full = settings["fullatt_block_indexes"]
    settings["fullatt_block_indexes"] = tuple(full) if isinstance(full, list) else full
    if section is not None:
        settings["mrope_section"] = tuple(section) if isinstance(section, list | tuple) else section
    result.architecture["vision"] = settings
    return {**other_fields, "text_config": text_fields}


def add_preprocessing(path: Path, architecture: dict[str, Any]) -> list[str]:
    """Adds mean and deviation of pixels from the directory's image processor to `architecture`; returns problems.

    Without a file of the processor they are the family's.
    """
    from roll_batching.huggingface.directory import read_json

    values: Mapping[str, Any] = {}
    for name in ("preprocessor_config.json", "processor_config.json"):
        if (path / name).is_file():
            content = read_json(path / name)
            values = content.get("image_processor", content if name.startswith("pre") else {})
            if not isinstance(values, Mapping):
                return [f"image_processor: {values!r} of {name} must be an object"]
            if values:
                break
    vision, problems = architecture["vision"], []
    for ours in ("image_mean", "image_std"):
        if values.get(ours) is not None:
            vision[ours] = tuple(values[ours]) if isinstance(values[ours], list) else values[ours]
    wanted = {
        "patch_size": vision["patch_size"],
        "temporal_patch_size": vision["temporal_patch_size"],
        "merge_size": vision["spatial_merge_size"],
        "do_rescale": True,
        "do_normalize": True,
        "do_convert_rgb": True,
    }
    for name, value in wanted.items():
        if values.get(name, value) != value:
            problems.append(f"{name}: {values[name]!r} of its image processor is not supported, only {value!r}")
    factor = values.get("rescale_factor", 1 / 255)
    if isinstance(factor, bool) or not isinstance(factor, int | float) or abs(factor - 1 / 255) > 1e-9:
        problems.append(f"rescale_factor: {values['rescale_factor']!r} of its image processor must be 1/255")
    return problems
