"""Directories of tiny vision-language models, made with transformers, and images for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.huggingface.tiny import MODELS, TEXT

MARKS = ("<s>", "<u>", "<a>", "<?>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
VOCABULARY = 61
START, IMAGE, END, VIDEO = (len(TEXT) + MARKS.index(mark) for mark in MARKS[4:])
TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'][0] + '>' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '$' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<a>' }}{% endif %}"
)
"""As Qwen2.5-VL's: one token of an image for each part."""
PREPROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2_5_VLProcessor",
    "min_pixels": 28 * 28,
    "max_pixels": 28 * 28 * 12,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}


def write_tokenizer(folder: Path, template: str | None = TEMPLATE) -> Any:
    """Characters, marks of roles and of images; end token `$`; a chat template."""
    from tokenizers import Regex, Tokenizer
    from tokenizers.decoders import Fuse
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast

    fast = Tokenizer(WordLevel({token: n for n, token in enumerate([*TEXT, *MARKS])}, unk_token="<?>"))
    fast.pre_tokenizer = Split(Regex("."), "isolated")
    fast.decoder = Fuse()
    fast.add_special_tokens(list(MARKS))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="$", pad_token=".", unk_token="<?>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return tokenizer


def config(family: str = "qwen2_5_vl", **changes: Any) -> Any:
    """Settings of the tiny model; `changes` of the text model."""
    from transformers import AutoConfig

    text = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
        "bos_token_id": None,
        "eos_token_id": TEXT.index("$"),
        **changes,
    }
    vision = {
        "depth": 2,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 2,
        "out_hidden_size": text["hidden_size"],
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
    if family == "qwen2_5_vl":
        vision |= {"window_size": 56, "fullatt_block_indexes": [1]}
    else:
        vision |= {"num_position_embeddings": 16}
        text["head_dim"] = 8
    if family.startswith("qwen3_vl"):
        vision |= {"deepstack_visual_indexes": [0]}
    if family.startswith("qwen3_5"):
        text |= {**MODELS[family][1], "layer_types": ["linear_attention", "full_attention"]}
    if family.endswith("moe"):
        text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "router_aux_loss_coef": 0.0}
    return AutoConfig.for_model(
        family,
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
        tie_word_embeddings=False,
    )


def write_directory(
    folder: Path,
    *,
    weights: bool = True,
    template: str | None = TEMPLATE,
    family: str = "qwen2_5_vl",
    **changes: Any,
) -> Path:
    """A model directory, without weights where only images and texts are read."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder, template)
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    if not weights:
        config(family, **changes).save_pretrained(folder)
        return folder
    import torch
    from transformers import AutoModelForImageTextToText

    torch.manual_seed(5)
    AutoModelForImageTextToText.from_config(config(family, **changes)).save_pretrained(folder)
    return folder


def reward(completion: Any) -> float:
    """Different characters of a response."""
    return len(set(completion.response)) / 10


def picture(seed: int, width: int = 70, height: int = 50) -> Any:
    """A picture of noise over a gradient: [height, width, 3] as a pillow image."""
    from PIL import Image

    noise = np.random.default_rng(seed).integers(0, 120, (height, width, 3))
    slope = np.linspace(0, 120, width)[None, :, None]
    return Image.fromarray((noise + slope).astype(np.uint8))


def processor(folder: Path) -> Any:
    """transformers' processor of the directory, without the part for videos, which needs torchvision."""
    from transformers import AutoTokenizer, Qwen2_5_VLProcessor, Qwen2VLImageProcessorPil

    class Images(Qwen2_5_VLProcessor):
        @classmethod
        def get_attributes(cls) -> list[str]:
            return ["image_processor", "tokenizer"]

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return Images(Qwen2VLImageProcessorPil.from_pretrained(folder), tokenizer, chat_template=tokenizer.chat_template)
