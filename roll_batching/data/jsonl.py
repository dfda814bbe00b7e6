"""JSON Lines, read whole and strictly: every error names file and line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roll_batching.errors import DataError

PathLike = str | Path


@dataclass(frozen=True)
class Record:
    """One line: the texts asked for, everything else, and its place as `file:line`."""

    texts: tuple[str, ...]
    extra: dict[str, Any]
    source: str


def read_records(paths: PathLike | Sequence[PathLike], keys: Sequence[str]) -> list[Record]:
    """Read JSONL files, one after the other; every line is an object that holds a text under each of `keys`.

    Blank lines are skipped. Line numbers begin at 1.

    Raises:
        DataError: for a file that is missing or cannot be read, a file without records, a line that is not
            UTF-8, not JSON or not an object, a key that is missing or does not hold a text.
    """
    files = [paths] if isinstance(paths, (str, Path)) else list(paths)
    if not files:
        raise DataError("No data file was named.")
    return [record for file in files for record in _read_file(Path(file), keys)]


def _read_file(path: Path, keys: Sequence[str]) -> list[Record]:
    try:
        content = path.read_bytes()
    except OSError as error:
        why = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
        raise DataError(
            f"Data file {path} {why}; looked at {path.absolute()}. Relative paths start at the working directory."
        ) from None
    records = [
        _parse(line, f"{path}:{number}", keys)
        for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1)
        if line.strip()
    ]
    if not records:
        raise DataError(f"Data file {path} holds no records: one JSON object per line is needed.")
    return records


def _parse(line: bytes, source: str, keys: Sequence[str]) -> Record:
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"{source}: not UTF-8 (byte {error.start + 1} of the line).") from None
    except json.JSONDecodeError as error:
        raise DataError(f"{source}: not valid JSON: {error.msg} at column {error.colno}.") from None
    except RecursionError:
        raise DataError(f"{source}: nested too deeply.") from None
    if not isinstance(value, dict):
        raise DataError(f"{source}: a JSON object is needed, got {type(value).__name__}.")
    texts = []
    for key in keys:
        if key not in value:
            raise DataError(f"{source}: key {key!r} is missing; the line has {', '.join(value) or 'no keys'}.")
        if not isinstance(value[key], str):
            raise DataError(f"{source}: {key!r} must be a string, got {type(value[key]).__name__}.")
        texts.append(value[key])
    return Record(tuple(texts), {k: v for k, v in value.items() if k not in keys}, source)
