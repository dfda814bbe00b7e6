"""Write a tiny Qwen2.5-VL or Qwen3-VL with random weights, pictures of one to four squares, and questions about them.

    python examples/vision/make_data.py
    python examples/vision/make_data.py --family qwen3_vl

The model directory has the files of a downloaded model: config.json, model.safetensors, a tokenizer with a chat
template, preprocessor_config.json. In control.jsonl the pictures of train.jsonl are dealt anew: they say nothing about
the answers. warmup.jsonl has questions and answers without pictures.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessorPil,
)

MARKS = ["<|im_start|>", "<|im_end|>", "<|pad|>", "<|unknown|>"]
IMAGE_MARKS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
CHARACTERS = "0123456789 abcdefghijklmnopqrstuvwxyz.?\n"
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}{% else %}{{ part['text'] }}"
    "{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ENCODERS = {
    "qwen2_5_vl": {"depth": 2, "window_size": 56, "fullatt_block_indexes": [1]},
    "qwen3_vl": {"depth": 3, "patch_size": 14, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
}
"""Sizes of the encoder that the families do not share."""
SECTIONS = {"qwen2_5_vl": [2, 3, 3], "qwen3_vl": [4, 2, 2]}
"""Pairs of rotated channels by axis: time, height, width."""
MODELS = {"qwen2_5_vl": "tiny-qwen2.5-vl", "qwen3_vl": "tiny-qwen3-vl"}
"""Folder of each family's model."""
TILE = 28
"""Side of a square in pixels, which becomes one token."""


def write_model(folder: Path, family: str) -> None:
    """A model of a family with random weights, one token per character, and its image processor."""
    vocabulary = {token: number for number, token in enumerate([*MARKS, *IMAGE_MARKS, *CHARACTERS])}
    fast = Tokenizer(WordLevel(vocabulary, unk_token="<|unknown|>"))
    fast.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    fast.decoder = Fuse()
    fast.add_special_tokens([*MARKS, *IMAGE_MARKS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=fast, eos_token="<|im_end|>", pad_token="<|pad|>", unk_token="<|unknown|>"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    Qwen2VLImageProcessorPil(min_pixels=TILE**2, max_pixels=16 * TILE**2).save_pretrained(folder)
    torch.manual_seed(1)
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    config = AutoConfig.for_model(
        family,
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 64,
            "intermediate_size": 160,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 256,
            "initializer_range": 0.06,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": SECTIONS[family]},
            "bos_token_id": None,
            "eos_token_id": eos,
            "pad_token_id": pad,
        },
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "out_hidden_size": 64,
            "initializer_range": 0.06,
            **ENCODERS[family],
        },
        vision_start_token_id=vocabulary["<|vision_start|>"],
        vision_end_token_id=vocabulary["<|vision_end|>"],
        image_token_id=vocabulary["<|image_pad|>"],
        video_token_id=vocabulary["<|video_pad|>"],
        tie_word_embeddings=False,
    )
    model = AutoModelForImageTextToText.from_config(config)
    model.generation_config = GenerationConfig(eos_token_id=[eos], pad_token_id=pad)
    model.save_pretrained(folder)
    print(f"{folder}: {sum(parameter.numel() for parameter in model.parameters()):,} parameters")


def draw(count: int, rng: np.random.Generator) -> Image.Image:
    """A grey picture of 2 x 2, 2 x 3 or 3 x 2 tiles, of which `count` are coloured squares."""
    rows, columns = [(2, 2), (2, 3), (3, 2)][rng.integers(3)]
    pixels = rng.integers(90, 130, (rows * TILE, columns * TILE, 3))
    for place in rng.permutation(rows * columns)[:count]:
        y, x = divmod(int(place), columns)
        pixels[y * TILE : (y + 1) * TILE, x * TILE : (x + 1) * TILE] = rng.choice([20, 235], 3)
    return Image.fromarray(pixels.astype(np.uint8))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("data/vision"), help="folder for model, pictures and texts")
    parser.add_argument("--family", choices=MODELS, default="qwen2_5_vl", help="family of the model")
    args = parser.parse_args()
    write_model(args.out / MODELS[args.family], args.family)
    (args.out / "pictures").mkdir(exist_ok=True)
    rng = np.random.default_rng(0)
    rows = []
    for number in range(560):
        count, name = int(rng.integers(1, 5)), f"pictures/{number:03d}.png"
        draw(count, rng).save(args.out / name)
        question = {"role": "user", "content": "<image>how many?"}
        answer = {"role": "assistant", "content": str(count)}
        rows.append({"prompt": [question], "answer": str(count), "messages": [question, answer], "images": [name]})
    heldout, train = rows[:48], rows[48:]
    others = rng.permutation(len(train))
    control = [row | {"images": train[other]["images"]} for row, other in zip(train, others, strict=True)]
    chats = [{"messages": [{"role": "user", "content": "how many?"}, row["messages"][1]]} for row in train]
    for name, records in (("train", train), ("control", control), ("heldout", heldout), ("warmup", chats)):
        path = args.out / f"{name}.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


if __name__ == "__main__":
    main()
