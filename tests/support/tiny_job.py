"""The parts that the tests' tiny jobs share."""

from __future__ import annotations

from typing import Any

VOCABULARY = "0123456789+-=;#abcdefghijklmnopqrstuvwxyz$."
TOKENIZER = {"type": "char", "vocabulary": VOCABULARY, "eos_token": "$", "pad_token": "."}
ARCHITECTURE = {
    "vocab_size": 43,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 128,
}


def with_changes(settings: dict[str, Any], changes: dict[str, Any], separator: str = "__") -> dict[str, Any]:
    """`settings` with other values in place; `a__b=value` changes a.b."""
    for path, value in changes.items():
        *above, last = path.split(separator)
        section = settings
        for key in above:
            section = section.setdefault(key, {})
        section[last] = value
    return settings
