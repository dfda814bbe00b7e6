"""Write a tiny Qwen3 model directory with random weights, and chats for training.

    python examples/hf_model/make_model.py

The directory has the files of a downloaded model: config.json, generation_config.json, model.safetensors, a tokenizer
and its chat template. A model directory of any supported family can replace it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

MARKS = ["<|im_start|>", "<|im_end|>", "<|pad|>", "<|unknown|>"]
CHARACTERS = "0123456789 abcdefghijklmnopqrstuvwxyz.?\n"
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_tokenizer(folder: Path, characters: str) -> PreTrainedTokenizerFast:
    """One token per character, and Qwen's special tokens for turns."""
    vocabulary = {token: number for number, token in enumerate([*MARKS, *characters])}
    fast = Tokenizer(WordLevel(vocabulary, unk_token="<|unknown|>"))
    fast.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    fast.decoder = Fuse()
    fast.add_special_tokens(MARKS)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=fast, eos_token="<|im_end|>", pad_token="<|pad|>", unk_token="<|unknown|>"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return tokenizer


def write_model(folder: Path, characters: str = CHARACTERS) -> None:
    """Random weights and a tokenizer of `characters`."""
    tokenizer = write_tokenizer(folder, characters)
    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.06,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=[tokenizer.eos_token_id], pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    print(f"{folder}: {sum(parameter.numel() for parameter in model.parameters()):,} parameters")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("data/hf_model"), help="folder for model and chats")
    args = parser.parse_args()
    write_model(args.out / "tiny-qwen3")
    chats = [{"messages": [{"role": "user", "content": f"digits {number}?"}], "answer": ""} for number in range(400)]
    for name, rows in (("heldout", chats[:40]), ("prompts", chats[40:])):
        path = args.out / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
