"""Families whose vision encoder is trained, too: Qwen2.5-VL, Qwen3-VL and, with images, Qwen3.5; with and without
experts.

Sources: transformers' configuration and modeling files of these families.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roll_batching.huggingface.families import QWEN3_5_MOE_TEXT, QWEN3_5_TEXT
from roll_batching.huggingface.family import EncoderFields, Family
from roll_batching.huggingface.fields import ALWAYS, BESIDE_TEXT, WITHOUT_EFFECT
from roll_batching.huggingface.layer_rules import STACKED_GATED_MIXTURE
from roll_batching.huggingface.tensors import TensorRule

_Shapes = dict[str, tuple[int, ...]]


def _rules(shapes: _Shapes) -> list[TensorRule]:
    """Rules of an encoder's tensors, whole on every rank and named as in the files."""
    return [TensorRule(f"visual.{name}", "copy", ((f"visual.{name}", shape),)) for name, shape in shapes.items()]


def _linear(name: str, outputs: int, inputs: int) -> _Shapes:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def _norm(name: str, width: int) -> _Shapes:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _attention(vision: Any, block: str) -> _Shapes:
    hidden = vision.hidden_size
    return {**_linear(f"{block}.attn.qkv", 3 * hidden, hidden), **_linear(f"{block}.attn.proj", hidden, hidden)}


def _patch(vision: Any) -> tuple[int, ...]:
    return (vision.hidden_size, 3, vision.temporal_patch_size, vision.patch_size, vision.patch_size)


def _qwen2_5_rules(architecture: Any) -> list[TensorRule]:
    vision, hidden = architecture.vision, architecture.vision.hidden_size
    merged, ffn = hidden * vision.spatial_merge_size**2, vision.intermediate_size
    shapes: _Shapes = {"patch_embed.proj.weight": _patch(vision)}
    for block in (f"blocks.{layer}" for layer in range(vision.depth)):
        shapes |= {f"{block}.norm1.weight": (hidden,), f"{block}.norm2.weight": (hidden,), **_attention(vision, block)}
        shapes |= {**_linear(f"{block}.mlp.gate_proj", ffn, hidden), **_linear(f"{block}.mlp.up_proj", ffn, hidden)}
        shapes |= _linear(f"{block}.mlp.down_proj", hidden, ffn)
    shapes |= {"merger.ln_q.weight": (hidden,), **_linear("merger.mlp.0", merged, merged)}
    return _rules(shapes | _linear("merger.mlp.2", architecture.hidden_size, merged))


def _qwen3_rules(architecture: Any) -> list[TensorRule]:
    vision, hidden = architecture.vision, architecture.vision.hidden_size
    merged, ffn = hidden * vision.spatial_merge_size**2, vision.intermediate_size
    shapes: _Shapes = {
        "patch_embed.proj.weight": _patch(vision),
        "patch_embed.proj.bias": (hidden,),
        "pos_embed.weight": (vision.num_position_embeddings, hidden),
    }
    for block in (f"blocks.{layer}" for layer in range(vision.depth)):
        shapes |= {**_norm(f"{block}.norm1", hidden), **_norm(f"{block}.norm2", hidden), **_attention(vision, block)}
        shapes |= {**_linear(f"{block}.mlp.linear_fc1", ffn, hidden), **_linear(f"{block}.mlp.linear_fc2", hidden, ffn)}
    inner = [f"deepstack_merger_list.{number}" for number in range(len(vision.deepstack_visual_indexes))]
    for merger in ("merger", *inner):
        shapes |= _norm(f"{merger}.norm", hidden if merger == "merger" else merged)
        shapes |= _linear(f"{merger}.linear_fc1", merged, merged)
        shapes |= _linear(f"{merger}.linear_fc2", architecture.hidden_size, merged)
    return _rules(shapes)


_TOKENS: Mapping[str, int] = {
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
}
_ALWAYS: Mapping[str, Any] = {
    **{name: value for name, value in ALWAYS.items() if name != "hidden_act"},
    "in_channels": 3,
    "in_chans": 3,
    "rope_parameters": {"rope_type": "axial", "rope_theta": 10000.0},
}
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
    encoder=EncoderFields(
        sizes={
            "depth": 32,
            "hidden_size": 3584,
            "intermediate_size": 3420,
            "num_heads": 16,
            "patch_size": 14,
            "temporal_patch_size": 2,
            "spatial_merge_size": 2,
            "window_size": 112,
            "fullatt_block_indexes": (7, 15, 23, 31),
        },
        tokens=_TOKENS,
        always={**_ALWAYS, "hidden_act": "silu"},
        rules=_qwen2_5_rules,
    ),
    other_prefixes=(("model.", "model.language_model."), ("visual.", "model.visual.")),
)
"""Files of the hub, and of transformers 5, have `visual.` and `model.`; those of transformers 4.52 and later 4.x
`model.visual.` and `model.language_model.`."""
_QWEN3_ENCODER = EncoderFields(
    sizes={
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_heads": 16,
        "patch_size": 16,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": (8, 16, 24),
    },
    tokens=_TOKENS,
    settings={
        "type": "qwen3_vl",
        "mrope_section": (24, 20, 20),
        "mrope_interleaved": True,
        "image_mean": (0.5, 0.5, 0.5),
        "image_std": (0.5, 0.5, 0.5),
    },
    always={**_ALWAYS, "hidden_act": "gelu_pytorch_tanh"},
    rules=_qwen3_rules,
)
_QWEN3_PREFIXES = (("model.", "model.language_model."), ("visual.", "model.visual."))
QWEN3_VL = Family(
    model_type="qwen3_vl",
    architecture="Qwen3VLForConditionalGeneration",
    text_model="qwen3_vl_text",
    defaults={
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 128000,
        "rms_norm_eps": 1e-6,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
    },
    qk_layernorm=True,
    encoder=_QWEN3_ENCODER,
    prefixes=_QWEN3_PREFIXES,
)
QWEN3_VL_MOE = dataclasses.replace(
    QWEN3_VL,
    model_type="qwen3_vl_moe",
    architecture="Qwen3VLMoeForConditionalGeneration",
    text_model="qwen3_vl_moe_text",
    defaults={
        **QWEN3_VL.defaults,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": None,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 4,
        "num_experts": 60,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    always={"norm_topk_prob": True, "sliding_window": None},
    mixture=STACKED_GATED_MIXTURE,
    stacks_gated_experts=True,
    normalised_experts=True,
)
QWEN3_5 = dataclasses.replace(
    QWEN3_5_TEXT,
    model_type="qwen3_5",
    architecture="Qwen3_5ForConditionalGeneration",
    text_model="qwen3_5_text",
    encoder=dataclasses.replace(
        _QWEN3_ENCODER,
        on_request=True,
        sizes={name: size for name, size in _QWEN3_ENCODER.sizes.items() if name != "deepstack_visual_indexes"},
        tokens={
            "image_token_id": 248056,
            "video_token_id": 248057,
            "vision_start_token_id": 248053,
            "vision_end_token_id": 248054,
        },
        settings={**_QWEN3_ENCODER.settings, "mrope_section": (11, 11, 10)},
        always={**_QWEN3_ENCODER.always, "deepstack_visual_indexes": []},
    ),
    prefixes=_QWEN3_PREFIXES,
    untrained=("model.visual.", "mtp."),
)
"""Its encoder is Qwen3-VL's, without outputs of inner layers."""
QWEN3_5_MOE = dataclasses.replace(
    QWEN3_5_MOE_TEXT,
    model_type="qwen3_5_moe",
    architecture="Qwen3_5MoeForConditionalGeneration",
    text_model="qwen3_5_moe_text",
    encoder=QWEN3_5.encoder,
    prefixes=QWEN3_5.prefixes,
    untrained=QWEN3_5.untrained,
)
_TOP = {*BESIDE_TEXT, "vision_token_id", "model_type", "architectures", "transformers_version"} - {"initializer_range"}
"""Fields beside the text model's where both are at the top, as on the hub; `vision_token_id` has no effect."""
_WITHOUT_EFFECT = (*WITHOUT_EFFECT, "tokens_per_second", "spatial_patch_size", "initializer_range")
"""Fields of `vision_config` that images do not need; `tokens_per_second` is for videos."""


def translate_vision(config: Mapping[str, Any], family: Family, result: Any) -> dict[str, Any]:
    """`config` with the text model in `text_config`; its vision goes into `result.architecture`.

    Without `text_config` the text model's fields are at the top, as in Qwen2.5-VL's files on the hub.
    """
    fields, model_type = family.encoder, family.model_type
    assert fields is not None
    other_fields = dict(config)
    if other_fields.get("text_config") is None:
        text_fields = {name: value for name, value in config.items() if name not in _TOP}
        other_fields = {name: value for name, value in config.items() if name in _TOP and name != "text_config"}
    else:
        text_fields = dict(config["text_config"]) if isinstance(config["text_config"], Mapping) else {}
    other_fields.pop("vision_token_id", None)
    if family.stacks_gated_experts:  # transformers writes its default there, true, and reads that beside text_config
        text_fields.pop("tie_word_embeddings", None)
    settings: dict[str, Any] = dict(fields.settings)
    alternates = settings.get("mrope_interleaved")
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(text_fields.get(name), Mapping):
            rope = dict(text_fields[name])
            section = rope.pop("mrope_section", None)
            if section is not None:
                settings["mrope_section"] = tuple(section) if isinstance(section, list | tuple) else section
            if alternates and rope.pop("mrope_interleaved", True) is not True:
                result.problems.append(f"{name}.mrope_interleaved must be true for model_type {model_type}")
            kinds = {key: "default" for key in ("type", "rope_type") if rope.get(key) == "mrope"}
            text_fields[name] = rope | kinds
    vision = config.get("vision_config")
    if not isinstance(vision, Mapping):
        result.problems.append(f"vision_config: {vision!r} must be an object, the encoder of {model_type}")
        vision = {}
    for name, value in vision.items():
        if name in fields.always and value is not None and value != fields.always[name]:
            result.problems.append(f"vision_config.{name}: {value!r} is not supported, only {fields.always[name]!r}")
        elif name not in (*fields.sizes, *fields.always, *_WITHOUT_EFFECT, "out_hidden_size") and value is not None:
            result.problems.append(f"vision_config.{name}: {value!r} is an unknown field of model_type {model_type}")
    out = vision.get("out_hidden_size", 3584)
    hidden = text_fields.get("hidden_size", family.defaults.get("hidden_size"))
    if out != hidden:
        result.problems.append(f"vision_config.out_hidden_size: {out!r} must be hidden_size of the text, {hidden!r}")
    settings |= {name: config.get(name, default) for name, default in fields.tokens.items()}
    for name, default in fields.sizes.items():
        value = vision.get(name, default)
        settings[name] = tuple(value) if isinstance(value, list) else value
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
