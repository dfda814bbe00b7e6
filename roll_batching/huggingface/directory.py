"""The directory of a model: found by path or in Hugging Face's cache, its JSON files read and translated."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roll_batching.errors import ConfigError
from roll_batching.files import cause
from roll_batching.huggingface.config_json import Translation, translate

CONFIG, GENERATION, INDEX, SINGLE = (
    "config.json",
    "generation_config.json",
    "model.safetensors.index.json",
    "model.safetensors",
)
_TEXTS = (".json", ".txt", ".model", ".jinja", ".tiktoken")


def find_directory(name: str) -> Path | None:
    """The directory `name`, or the one that Hugging Face's cache holds for the model of this name; None: neither.

    Nothing is downloaded.
    """
    path = os.path.expanduser(name)
    if os.path.isdir(path):
        return Path(path)
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    try:
        found = try_to_load_from_cache(name, CONFIG)
    except (ValueError, OSError):  # no name that a model can have
        return None
    return Path(found).parent if isinstance(found, str) else None


def directory_of(name: str) -> Path:
    """As `find_directory`. Raises ConfigError where there is none."""
    found = find_directory(name)
    if found is None:
        raise ConfigError(
            f"{name[:200]!r} is no directory here, and no model in Hugging Face's cache: give the directory that holds "
            f"{CONFIG}, or download the model first (hf download NAME)"
        )
    return found


def described(name: str) -> Translation | None:
    """What `config.json` of the model `name` comes to; None without such a directory. Raises nothing."""
    path = find_directory(name)
    if path is None:
        return None
    try:
        return translate(read_json(path / CONFIG))
    except ConfigError as error:
        return Translation(problems=[str(error)])


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object. Raises ConfigError, naming the file, when it cannot be read."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {cause(error)}") from None
    except ValueError as error:
        raise ConfigError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{file} holds no JSON object")
    return value


def stop_tokens(path: Path) -> tuple[int, ...]:
    """The tokens that end a response, as `generation_config.json` says, else `config.json`; none where neither does."""
    for name in (GENERATION, CONFIG):
        file = path / name
        if not file.is_file():
            continue
        given = _eos(read_json(file))
        if given:
            return given
    return ()


def _eos(config: Mapping[str, Any]) -> tuple[int, ...]:
    given = config.get("eos_token_id")
    return () if given is None else tuple(given) if isinstance(given, list) else (given,)


def files_beside_weights(path: Path) -> list[Path]:
    """What a copy of the model needs beside its tensors: configuration, tokenizer, chat template; never code."""
    found = (file for file in path.iterdir() if file.is_file() and file.suffix in _TEXTS)
    return sorted(file for file in found if not file.name.endswith(".index.json"))
