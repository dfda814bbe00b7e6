"""Finds a model directory by path or in Hugging Face's cache, and reads its JSON files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roll_batching.errors import ConfigError
from roll_batching.files import cause, open_regular

CONFIG, GENERATION, INDEX, SINGLE = (
    "config.json",
    "generation_config.json",
    "model.safetensors.index.json",
    "model.safetensors",
)
TEXTS = (".json", ".txt", ".model", ".jinja", ".tiktoken")
"""Suffixes of configuration, tokenizer and chat template."""


def find_directory(name: str) -> Path | None:
    """The directory `name`, else the model of that name in Hugging Face's cache, else None. Downloads nothing."""
    path = os.path.expanduser(name)
    if os.path.isdir(path):
        return Path(path)
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    try:
        file = try_to_load_from_cache(name, CONFIG)
    except (ValueError, OSError):  # not a valid repository name
        return None
    return Path(file).parent if isinstance(file, str) else None


def directory_of(name: str) -> Path:
    """The directory of `find_directory`. Raises ConfigError if there is none."""
    path = find_directory(name)
    if path is None:
        raise ConfigError(
            f"{name[:200]!r} is neither a directory on this machine nor a model in Hugging Face's cache: give the "
            f"directory that holds {CONFIG}, or download the model first (hf download NAME)"
        )
    return path


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in `file`. Raises ConfigError, naming the file, if it cannot be read or holds another type."""
    try:
        with open_regular(file) as stream:
            value = json.loads(stream.read().decode("utf-8"))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {cause(error)}") from None
    except ValueError as error:
        raise ConfigError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{file} holds no JSON object: take the file of the model's publisher")
    return value


def stop_tokens(path: Path) -> tuple[int, ...]:
    """Ids of the end tokens in `generation_config.json`, else in `config.json`, else none."""
    for name in (GENERATION, CONFIG):
        file = path / name
        if not file.is_file():
            continue
        config = read_json(file)
        text_config = config.get("text_config")  # of a model with a vision encoder
        tokens = _eos(config) or _eos(text_config if isinstance(text_config, dict) else {})
        if tokens:
            return tokens
    return ()


def _eos(config: Mapping[str, Any]) -> tuple[int, ...]:
    value = config.get("eos_token_id")
    return () if value is None else tuple(value) if isinstance(value, list) else (value,)


def files_beside_weights(path: Path) -> list[Path]:
    """Files of `path` that an export copies: configuration, tokenizer, chat template; never code. Sorted."""
    texts = (file for file in path.iterdir() if file.is_file() and file.suffix in TEXTS)
    return sorted(file for file in texts if not file.name.endswith(".index.json"))
