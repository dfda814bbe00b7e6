"""Chat templates of published families, written after their behaviour, with their special tokens and stop tokens.

Each `chat_templates/NAME.jinja` renders turns, calls of tools and thoughts as the template published with the model,
without its instructions to the model.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_name("chat_templates")
STOPS = {
    "qwen2_5": ["<|im_end|>", "<|endoftext|>"],
    "qwen3": ["<|im_end|>", "<|endoftext|>"],
    "llama3": ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"],
    "mistral": ["</s>"],
    "glm4_5": ["<|endoftext|>", "<|user|>", "<|observation|>"],
    "glm4_7": ["<|endoftext|>", "<|user|>", "<|observation|>"],
    "gemma3": ["<eos>", "<end_of_turn>"],
    "gpt_oss": ["<|return|>", "<|endoftext|>", "<|call|>"],
    "deepseek_v3": ["<｜end▁of▁sentence｜>"],
    "minimax_m2": ["[e~["],
    "kimi_k2": ["<|im_end|>"],
}
"""The end token, then the other tokens of `eos_token_id` in the published generation_config.json."""
_SPECIAL = re.compile(
    r"<\|\w+\|>|<｜[^｜]+｜>|\[/?[A-Z_]+\]|\[gMASK\]|<sop>|</?s>|<(?:start|end)_of_turn>|<eos>|\]~!?b[\[\]]|\[e~\["
)
_CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n", "�"]


def write_directory(folder: Path, name: str, *, stops: list[str] | None = None) -> None:
    """Writes the tokenizer of a family, whose other tokens are characters, and its generation_config.json."""
    from tokenizers import Regex, Tokenizer
    from tokenizers.decoders import Fuse
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast

    template = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    special = list(dict.fromkeys([*STOPS[name], *_SPECIAL.findall(template), "<bos>"]))
    fast = Tokenizer(WordLevel({token: n for n, token in enumerate([*_CHARACTERS, *special])}, unk_token="�"))
    fast.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    fast.decoder = Fuse()
    fast.add_special_tokens(special)
    tokenizer: Any = PreTrainedTokenizerFast(
        tokenizer_object=fast, eos_token=STOPS[name][0], bos_token="<bos>", unk_token="�"
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    ids = tokenizer.convert_tokens_to_ids(STOPS[name] if stops is None else stops)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
