"""Strict reader of data files: collects every fault with file and line, not only the first."""

from __future__ import annotations

import io
import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roll_batching.jobs.texts.faults import Faults
from roll_batching.jobs.texts.image_references import ImageError, ImageFields, ImageReference
from roll_batching.jobs.texts.tables import Table, TableError, table_of

PathLike = str | Path

_LONGEST_LINE = 64 * 2**20
"""Most bytes of a line: a file without line ends would otherwise be read into memory at once."""
_BYTES_BETWEEN_REPORTS = 2**20
_COMPRESSED = {b"\x1f\x8b": "gzip", b"PK\x03\x04": "zip", b"\x28\xb5\x2f\xfd": "zstd", b"\xfd7zX": "xz"}
_MESSAGES = 'A chat is a list such as [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}].'
_IMAGES = "For a model that reads images set actor_train.data_args.images to the key of a record's images."
_ONE_OBJECT = "Each line is one JSON object, or the whole file a JSON array of them."


@dataclass(frozen=True, slots=True)
class Record:
    """One line of a data file: the texts of the requested keys, and its place as `file:line`."""

    texts: tuple[str, ...]
    line: dict[str, Any]
    """All of it as it stands in the file, with names in place of images."""
    source: str
    images: tuple[ImageReference, ...] = ()
    """In the order of the key; then those in messages."""


def as_files(paths: PathLike | Sequence[PathLike]) -> list[Path]:
    """One path or several as a list."""
    return [Path(paths)] if isinstance(paths, (str, Path)) else [Path(path) for path in paths]


def iterate_records(
    paths: PathLike | Sequence[PathLike],
    keys: Sequence[str],
    faults: Faults,
    read: Callable[[int], None] = lambda size: None,
    *,
    chat: bool = False,
    images: ImageFields | None = None,
) -> Iterator[Record]:
    """The records of data files, one file after the other: objects with a text under each of `keys`.

    A file is JSON Lines, or a table (`tables.table_of`) whose rows count as lines.

    With `chat` the first key holds a list of messages, each with `role` and `content`, or the JSON text of one; the
    record's first text is that list as JSON. A key such as `responses_create_params.input` names the input of a
    request of the Responses API, a text or messages whose contents are texts or text parts.

    Blank lines are skipped; line numbers begin at 1. Faults are added to `faults` and skipped: a file that is missing,
    not regular, unreadable or without records, a line that is not UTF-8, not JSON or not an object, a key that is
    missing or does not hold a text. `read` is called from time to time with bytes read. With `images` records have
    images, and contents of messages may be lists of parts.
    """
    files = as_files(paths)
    if not files:
        faults.add("No data file", "was named", "Name at least one.")
    for path in files:
        table = table_of(path)
        if table is None:
            yield from _records_of(path, keys, faults, read, chat, images)
        else:
            yield from _rows_of(table, keys, faults, read, chat, images)


def _records_of(
    path: Path,
    keys: Sequence[str],
    faults: Faults,
    read: Callable[[int], None],
    chat: bool,
    images: ImageFields | None,
) -> Iterator[Record]:
    faults_before, has_records, unreported = len(faults), False, 0
    try:
        with _open(path) as file:
            for number, line in _lines(file):
                unreported += len(line)
                if unreported > _BYTES_BETWEEN_REPORTS:
                    read(unreported)
                    unreported = 0
                if not line or line.isspace():
                    continue
                try:
                    record = _to_record(_parse(line), keys, chat, images, path, number)
                except _BadLineError as bad:
                    faults.add(f"{path}:{number}", bad.what, bad.cure)
                    continue
                has_records = True
                yield record
    except FileNotFoundError:
        cure = f"Looked at {path.absolute()}; relative paths start at the working directory."
        faults.add(str(path), "does not exist", cure)
    except OSError as error:
        faults.add(str(path), f"cannot be read ({error.strerror})", f"Looked at {path.absolute()}.")
    except _BadLineError as bad:
        faults.add(str(path), bad.what, bad.cure)
    read(unreported)
    if not has_records and len(faults) == faults_before:
        faults.add(str(path), "holds no records", "One JSON object per line is needed.")


def _rows_of(
    table: Table,
    keys: Sequence[str],
    faults: Faults,
    read: Callable[[int], None],
    chat: bool,
    images: ImageFields | None,
) -> Iterator[Record]:
    """As `_records_of`, for a table."""
    faults_before, number = len(faults), 0
    try:
        for number, value in enumerate(table.rows(read), 1):
            try:
                record = _to_record(_object(value), keys, chat, images, table.path, number)
            except _BadLineError as bad:
                faults.add(f"{table.path}:{number}", bad.what, bad.cure)
                continue
            yield record
    except TableError as error:
        faults.add(str(table.path), error.what, error.cure)
    if not number and len(faults) == faults_before:
        faults.add(str(table.path), "holds no records", "At least one row is needed.")


class _BadLineError(Exception):
    """A fault of a line or a file, and its cure."""

    def __init__(self, what: str, cure: str) -> None:
        self.what, self.cure = what, cure


def _open(path: Path) -> io.BufferedReader[io.FileIO]:
    """The open file, positioned after a byte order mark."""
    kind = os.stat(path).st_mode  # before opening: opening a pipe blocks until a process writes to it
    if stat.S_ISDIR(kind):
        raise _BadLineError("cannot be read: it is a folder", "Name the file in it.")
    if not stat.S_ISREG(kind):
        raise _BadLineError("cannot be read: it is a pipe or a device", "Every process reads it: name a regular file.")
    file = io.BufferedReader(io.FileIO(path), buffer_size=2**20)
    start = file.peek(4)[:4]
    compression = next((name for mark, name in _COMPRESSED.items() if start.startswith(mark)), None)
    if compression or start.startswith((b"\xff\xfe", b"\xfe\xff")):
        file.close()
        raise _BadLineError(f"is a {compression or 'UTF-16'} file", "Write it as uncompressed JSON Lines in UTF-8.")
    if start.startswith(b"\xef\xbb\xbf"):
        file.seek(3)
    return file


def _lines(file: io.BufferedReader[io.FileIO]) -> Iterator[tuple[int, bytes]]:
    number = 0
    while line := file.readline(_LONGEST_LINE):
        number += 1
        if len(line) == _LONGEST_LINE and not line.endswith(b"\n"):
            raise _BadLineError(
                f"line {number} is longer than {_LONGEST_LINE // 2**20} MiB; it and the following lines were not read",
                _ONE_OBJECT,
            )
        yield number, line


def _parse(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _BadLineError(f"not UTF-8 (byte {error.start + 1} of the line)", "Save the file as UTF-8.") from None
    except json.JSONDecodeError as error:
        raise _BadLineError(f"not valid JSON: {error.msg} at column {error.colno}", _ONE_OBJECT) from None
    except RecursionError:
        raise _BadLineError("nested too deeply", _ONE_OBJECT) from None
    except ValueError as error:  # an integer of more digits than Python converts
        raise _BadLineError(f"not valid JSON: {error}", _ONE_OBJECT) from None
    return _object(value)


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _BadLineError(f"a JSON object is needed, got {type(value).__name__}", _ONE_OBJECT)
    return value


def _to_record(
    value: dict[str, Any], keys: Sequence[str], chat: bool, images: ImageFields | None, path: Path, number: int
) -> Record:
    """The record with the texts under `keys`, the other keys, and its images."""
    taken: tuple[ImageReference, ...] = ()
    if images is not None:
        folder = path if path.is_dir() else path.parent
        try:
            taken = images.take(value, keys[0] if chat else None, folder.absolute())
        except ImageError as error:
            raise _BadLineError(error.what, error.cure) from None
    texts = tuple(
        _messages(value, key, images is not None) if chat and key == keys[0] else _text(value, key) for key in keys
    )
    return Record(texts, value, f"{path}:{number}", taken)


def _messages(value: dict[str, Any], key: str, with_images: bool) -> str:
    """The list of messages under `key`, as JSON; contents may be lists of parts `with_images`."""
    messages = _nested_input(value, key) if key not in value and "." in key else _value(value, key)
    if isinstance(messages, str):
        try:
            messages = json.loads(messages)
        except ValueError:
            raise _BadLineError(f"{key!r} is a text, but not the JSON of a list of messages", _MESSAGES) from None
    if not isinstance(messages, list) or not messages:
        raise _BadLineError(f"{key!r} must be a list of messages, got {type(messages).__name__}", _MESSAGES)
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise _BadLineError(f"message {number} of {key!r} has no role", _MESSAGES)
        content = message.get("content")
        if isinstance(content, list) and with_images:
            continue  # `ImageFields.take` has read its parts
        if isinstance(content, list) and any(
            isinstance(part, dict) and "image" in str(part.get("type")) for part in content
        ):
            raise _BadLineError(f"message {number} of {key!r} has an image", _IMAGES)
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise _BadLineError(f"message {number} of {key!r} has no text as content", _MESSAGES)
    text = json.dumps(messages, ensure_ascii=False)
    return _require_encodable(text, key)


def value_at(line: Mapping[str, Any], key: str) -> Any:
    """The value of `line` under `key`, or under a path such as `reward_model.ground_truth`; None without one."""
    if key in line:
        return line[key]
    above, dot, rest = key.partition(".")
    return value_at(line[above], rest) if dot and isinstance(line.get(above), Mapping) else None


def _nested_input(value: dict[str, Any], key: str) -> Any:
    """Messages of the Responses API's input at the dotted `key`, with texts as contents."""
    found: Any = value
    for part in key.split("."):
        found = _value(found if isinstance(found, dict) else {}, part)
    if isinstance(found, str):
        return [{"role": "user", "content": found}]
    return [_with_text(item) for item in found] if isinstance(found, list) else found


def _with_text(item: Any) -> Any:
    """`item` with its text parts joined, if its content is a list of them."""
    parts = item.get("content") if isinstance(item, dict) else None
    if isinstance(parts, list) and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        return {**item, "content": "".join(part["text"] for part in parts)}
    return item


def _value(value: dict[str, Any], key: str) -> Any:
    if key not in value:
        keys = ascii(", ".join(value))[1:-1]
        shown = keys if len(keys) <= 80 else f"{keys[:77]}..."
        raise _BadLineError(
            f"key {key!r} is missing; the line has {shown or 'no keys'}",
            "The configuration names the keys of a file beside its file_name (prompt, response).",
        )
    return value[key]


def _text(value: dict[str, Any], key: str) -> str:
    text = _value(value, key)
    if not isinstance(text, str):
        raise _BadLineError(f"{key!r} must be a string, got {type(text).__name__}", "Put the value in quotes.")
    return _require_encodable(text, key)


def _require_encodable(text: str, key: str) -> str:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = ascii(text[error.start])
            raise _BadLineError(
                f"{key!r} holds a lone surrogate: {half}", "Write both halves of the surrogate pair."
            ) from None
    return text
