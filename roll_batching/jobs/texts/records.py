"""Strict reader of data files, JSON Lines or tables: collects every fault with file and line, not only the first.

Tables are Parquet files, JSON arrays, folders that Hugging Face's `datasets` saved, and data sets of the hub.
"""

from __future__ import annotations

import codecs
import io
import json
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roll_batching.jobs.texts.faults import Fault, Faults
from roll_batching.jobs.texts.hub_data import hub_batches, is_hub_name
from roll_batching.jobs.texts.image_references import ImageFields, ImageReference

_STATE, _SPLITS = "state.json", "dataset_dict.json"
_PARQUET, _ARRAY = b"PAR1", re.compile(rb"\s*\[\s*\{")
_START = 4096
"""Bytes at the beginning of a file that tell its format; white space may precede an array."""
_BATCH_SIZE = 1024
"""Rows that are converted to Python objects together."""


@dataclass(frozen=True)
class Table:
    """A Parquet file, folder of `datasets`, name on the hub, or JSON array, which is read into memory as a whole."""

    path: Path | str
    is_array: bool = False

    def rows(self, on_bytes_read: Callable[[int], None] = lambda size: None) -> Iterator[Any]:
        """Yields the rows as plain data, without null keys of messages and tools; `on_bytes_read` gets bytes read.

        Raises Fault: without pyarrow, for a folder of several splits, for an invalid file.
        """
        if isinstance(self.path, Path) and self.is_array:
            yield from _of_array(self.path, on_bytes_read)
            return
        try:
            import pyarrow
        except ImportError:
            raise Fault("is a table, which needs pyarrow", "pip install 'roll-batching[parquet]'.") from None
        try:
            if isinstance(self.path, str):
                batches = hub_batches(self.path, _BATCH_SIZE)
            elif self.path.is_dir():
                batches = _of_arrow(self.path, on_bytes_read)
            else:
                batches = _of_parquet(self.path, on_bytes_read)
            for batch in batches:
                for row in batch.to_pylist():
                    # A column gives every row the keys of all rows: null keys of nested objects are left out.
                    yield {key: _non_null(value) if isinstance(value, list) else value for key, value in row.items()}
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise Fault(f"cannot be read as a table ({error})", "Write it again, or give JSON Lines.") from None


def table_of(path: Path | str) -> Table | None:
    """The table at `path`; None for another kind of file, or none. A text is a name on the hub."""
    if isinstance(path, str):
        return Table(path)
    if path.is_dir():
        return Table(path) if (path / _STATE).is_file() or (path / _SPLITS).is_file() else None
    if not path.is_file():
        return None
    try:
        with path.open("rb") as file:
            start = file.read(_START).removeprefix(codecs.BOM_UTF8)
    except OSError:
        return None  # reported when it is read as lines
    if _ARRAY.match(start):
        return Table(path, is_array=True)
    return Table(path) if start.startswith(_PARQUET) else None


def _of_array(path: Path, on_bytes_read: Callable[[int], None]) -> Iterator[Any]:
    cure = "Write it again, or give JSON Lines."
    try:
        rows = json.loads(path.read_bytes())
    except RecursionError:
        raise Fault("is a JSON array that is nested too deeply", cure) from None
    except (ValueError, OSError) as error:
        raise Fault(f"begins as a JSON array, but is not valid ({error})", cure) from None
    on_bytes_read(path.stat().st_size)
    yield from rows


def _of_parquet(path: Path, on_bytes_read: Callable[[int], None]) -> Iterator[Any]:
    import pyarrow.parquet as parquet

    file = parquet.ParquetFile(path)
    size, count = path.stat().st_size, max(file.metadata.num_rows, 1)
    for batch in file.iter_batches(batch_size=_BATCH_SIZE):
        on_bytes_read(size * batch.num_rows // count)
        yield batch


def _of_arrow(folder: Path, on_bytes_read: Callable[[int], None]) -> Iterator[Any]:
    import pyarrow

    if not (folder / _STATE).is_file():
        splits = ", ".join(json.loads((folder / _SPLITS).read_text(encoding="utf-8"))["splits"])
        raise Fault(f"holds several splits ({splits})", f"Name one: {folder}/NAME.")
    state = json.loads((folder / _STATE).read_text(encoding="utf-8"))
    for name in [entry["filename"] for entry in state["_data_files"]]:
        file = folder / name
        with pyarrow.memory_map(str(file)) as source:
            for batch in pyarrow.ipc.open_stream(source):
                on_bytes_read(batch.nbytes)
                for start in range(0, batch.num_rows, _BATCH_SIZE):
                    yield batch.slice(start, _BATCH_SIZE)


def _non_null(item: Any) -> Any:
    if isinstance(item, dict):
        return {key: _non_null(inner) for key, inner in item.items() if inner is not None}
    return [_non_null(inner) for inner in item] if isinstance(item, list) else item


# ---- records


PathLike = str | Path
Paths = PathLike | Sequence[PathLike] | range
"""One file or several, or numbers: each is the prompt and the `seed` of a line."""

_LONGEST_LINE = 64 * 2**20
"""Most bytes of a line: a file without line ends would otherwise be read into memory at once."""
_BYTES_BETWEEN_REPORTS = 2**20
_COMPRESSED = {b"\x1f\x8b": "gzip", b"PK\x03\x04": "zip", b"\x28\xb5\x2f\xfd": "zstd", b"\xfd7zX": "xz"}
_MESSAGES = 'A chat is a list such as [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}].'
_IMAGES = "For a model that reads images set actor_train.data_args.images to the key of a record's images."
_ONE_OBJECT = "Each line is one JSON object, or the whole file a JSON array of them."


@dataclass(frozen=True, slots=True)
class Record:
    """One line of a data file, with the texts of the requested keys."""

    texts: tuple[str, ...]
    line: dict[str, Any]
    """The whole line as the file has it, with names in place of images."""
    source: str
    """Place of the line, as `file:line`."""
    images: tuple[ImageReference, ...] = ()
    """Images under the key of images, then images in messages."""


def sources_of(paths: Paths) -> list[Path | str]:
    """One path or several as a list, in which names on the hub are texts; numbers have no file."""
    if isinstance(paths, range):
        return []
    several = [paths] if isinstance(paths, (str, Path)) else paths
    return [str(path) if is_hub_name(path) else Path(path) for path in several]


def as_files(paths: Paths) -> list[Path]:
    """The sources on this machine."""
    return [source for source in sources_of(paths) if isinstance(source, Path)]


def iterate_records(
    paths: Paths,
    keys: Sequence[str],
    faults: Faults,
    on_bytes_read: Callable[[int], None] = lambda size: None,
    *,
    chat: bool = False,
    images: ImageFields | None = None,
) -> Iterator[Record]:
    """Yields the records of data files, file after file: objects with a text under each of `keys`.

    A file is JSON Lines, or a table (`table_of`) whose rows count as lines.

    With `chat` the first key holds a list of messages, each with `role` and `content`, or the JSON text of one; the
    record's first text is that list as JSON. A key such as `responses_create_params.input` names the input of a
    request of the Responses API, a text or messages whose contents are texts or text parts.

    Blank lines are skipped; line numbers begin at 1. Faults are added to `faults` and skipped: a file that is missing,
    not regular, unreadable or without records, a line that is not UTF-8, not JSON or not an object, a key that is
    missing or does not hold a text. `on_bytes_read` is called from time to time with the number of bytes. With `images`
    records have images, and contents of messages may be lists of parts.
    """
    if isinstance(paths, range):
        yield from (Record((str(n),), {keys[0]: str(n), "seed": n}, f"seed {n}") for n in paths)
        return
    sources = sources_of(paths)
    if not sources:
        faults.add("No data file", "was named", "Name at least one.")
    for path in sources:
        yield from _records_of(path, keys, faults, on_bytes_read, chat, images)


def _records_of(
    path: Path | str,
    keys: Sequence[str],
    faults: Faults,
    on_bytes_read: Callable[[int], None],
    chat: bool,
    images: ImageFields | None,
) -> Iterator[Record]:
    table, faults_before, has_records = table_of(path), len(faults), False
    try:
        rows = _lines(Path(path), on_bytes_read) if table is None else enumerate(table.rows(on_bytes_read), 1)
        for number, row in rows:
            try:
                record = _to_record(_parse(row) if table is None else row, keys, chat, images, path, number)
            except Fault as fault:
                faults.add(f"{path}:{number}", fault.what, fault.cure)
                continue
            has_records = True
            yield record
    except FileNotFoundError:
        cure = f"Looked at {Path(path).absolute()}; relative paths start at the working directory."
        faults.add(str(path), "does not exist", cure)
    except OSError as error:
        faults.add(str(path), f"cannot be read ({error.strerror})", f"Looked at {Path(path).absolute()}.")
    except Fault as fault:
        faults.add(str(path), fault.what, fault.cure)
    if not has_records and len(faults) == faults_before:
        cure = "One JSON object per line is needed." if table is None else "At least one row is needed."
        faults.add(str(path), "holds no records", cure)


def _open(path: Path) -> io.BufferedReader[io.FileIO]:
    """Opens the file, and skips a byte order mark. Raises Fault for a file that cannot be JSON Lines."""
    kind = os.stat(path).st_mode  # before opening: opening a pipe blocks until a process writes to it
    if stat.S_ISDIR(kind):
        raise Fault("cannot be read: it is a folder", "Name the file in it.")
    if not stat.S_ISREG(kind):
        raise Fault("cannot be read: it is a pipe or a device", "Every process reads it: name a regular file.")
    if path.suffix in (".bin", ".idx") and all(path.with_suffix(suffix).is_file() for suffix in (".bin", ".idx")):
        raise Fault("is one of Megatron's two files of token ids", f"Name their prefix: {path.with_suffix('')}.")
    file = io.BufferedReader(io.FileIO(path), buffer_size=2**20)
    start = file.peek(4)[:4]
    compression = next((name for mark, name in _COMPRESSED.items() if start.startswith(mark)), None)
    if compression or start.startswith((b"\xff\xfe", b"\xfe\xff")):
        file.close()
        raise Fault(f"is a {compression or 'UTF-16'} file", "Write it as uncompressed JSON Lines in UTF-8.")
    if start.startswith(b"\xef\xbb\xbf"):
        file.seek(3)
    return file


def _lines(path: Path, on_bytes_read: Callable[[int], None]) -> Iterator[tuple[int, bytes]]:
    """Yields number and bytes of each line that is not blank."""
    number = unreported = 0
    with _open(path) as file:
        try:
            while line := file.readline(_LONGEST_LINE):
                number += 1
                if len(line) == _LONGEST_LINE and not line.endswith(b"\n"):
                    raise Fault(
                        f"line {number} is longer than {_LONGEST_LINE // 2**20} MiB; it and the following lines were "
                        "not read",
                        _ONE_OBJECT,
                    )
                unreported += len(line)
                if unreported > _BYTES_BETWEEN_REPORTS:
                    on_bytes_read(unreported)
                    unreported = 0
                if not line.isspace():
                    yield number, line
        finally:
            on_bytes_read(unreported)


def _parse(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise Fault(f"not UTF-8 (byte {error.start + 1} of the line)", "Save the file as UTF-8.") from None
    except json.JSONDecodeError as error:
        raise Fault(f"not valid JSON: {error.msg} at column {error.colno}", _ONE_OBJECT) from None
    except RecursionError:
        raise Fault("nested too deeply", _ONE_OBJECT) from None
    except ValueError as error:  # an integer of more digits than Python converts
        raise Fault(f"not valid JSON: {error}", _ONE_OBJECT) from None


def _to_record(
    value: Any, keys: Sequence[str], chat: bool, images: ImageFields | None, path: Path | str, number: int
) -> Record:
    """Makes the record of a line: checks the texts under `keys`, and takes its images. Raises Fault."""
    if not isinstance(value, dict):
        raise Fault(f"a JSON object is needed, got {type(value).__name__}", _ONE_OBJECT)
    taken: tuple[ImageReference, ...] = ()
    if images is not None:
        folder = Path() if isinstance(path, str) else path if path.is_dir() else path.parent
        taken = images.take(value, keys[0] if chat else None, folder.absolute())
    texts = (
        _pair_of_chats(value, keys)
        if chat and keys[0] in keys[1:]
        else tuple(
            _messages(value, key, images is not None) if chat and key == keys[0] else _text(value, key) for key in keys
        )
    )
    return Record(texts, value, f"{path}:{number}", taken)


def _messages(value: dict[str, Any], key: str, with_images: bool) -> str:
    """Checks the list of messages under `key`, and returns it as the text of its JSON.

    `with_images`: the content of a message may be a list of parts in place of a text.
    """
    messages = _nested_input(value, key) if key not in value and "." in key else _value(value, key)
    if isinstance(messages, str):
        try:
            messages = json.loads(messages)
        except ValueError:
            raise Fault(f"{key!r} is a text, but not the JSON of a list of messages", _MESSAGES) from None
    if not isinstance(messages, list) or not messages:
        raise Fault(f"{key!r} must be a list of messages, got {type(messages).__name__}", _MESSAGES)
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise Fault(f"message {number} of {key!r} has no role", _MESSAGES)
        content = message.get("content")
        if isinstance(content, list) and with_images:
            continue  # `ImageFields.take` has read its parts
        if isinstance(content, list) and any(
            isinstance(part, dict) and "image" in str(part.get("type")) for part in content
        ):
            raise Fault(f"message {number} of {key!r} has an image", _IMAGES)
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise Fault(f"message {number} of {key!r} has no text as content", _MESSAGES)
    text = json.dumps(messages, ensure_ascii=False)
    return _require_encodable(text, key)


def _pair_of_chats(value: dict[str, Any], keys: Sequence[str]) -> tuple[str, ...]:
    """Splits whole chats under `keys[1:]` into the messages before the last, as JSON, and the last ones' texts."""
    chats = [json.loads(_messages(value, key, False)) for key in keys[1:]]
    ends = [chat.pop() for chat in chats]
    if any(end["role"] != "assistant" or not isinstance(end["content"], str) for end in ends):
        raise Fault(f"{' or '.join(map(repr, keys[1:]))} does not end with a text of the assistant", _MESSAGES)
    if not chats[0] or chats[0] != chats[-1]:
        raise Fault(f"{' and '.join(map(repr, keys[1:]))} do not differ in their last message alone", _MESSAGES)
    return (json.dumps(chats[0], ensure_ascii=False), *(end["content"] for end in ends))


def value_at(line: Mapping[str, Any], key: str) -> Any:
    """The value of `line` under `key`, or under a path such as `reward_model.ground_truth`; None without one."""
    if key in line:
        return line[key]
    above, dot, rest = key.partition(".")
    return value_at(line[above], rest) if dot and isinstance(line.get(above), Mapping) else None


def _nested_input(value: dict[str, Any], key: str) -> Any:
    """Returns the messages of the Responses API's input at the dotted `key`, with texts as contents."""
    nested: Any = value
    for part in key.split("."):
        nested = _value(nested if isinstance(nested, dict) else {}, part)
    if isinstance(nested, str):
        return [{"role": "user", "content": nested}]
    return [_with_text(item) for item in nested] if isinstance(nested, list) else nested


def _with_text(item: Any) -> Any:
    """Joins the text parts of a message's content, if it is a list of text parts."""
    parts = item.get("content") if isinstance(item, dict) else None
    if isinstance(parts, list) and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        return {**item, "content": "".join(part["text"] for part in parts)}
    return item


def _value(value: dict[str, Any], key: str) -> Any:
    if key not in value:
        keys = ascii(", ".join(value))[1:-1]
        keys = keys if len(keys) <= 80 else f"{keys[:77]}..."
        raise Fault(
            f"key {key!r} is missing; the line has {keys or 'no keys'}",
            "The configuration names the keys of a file beside its file_name (prompt, response).",
        )
    return value[key]


def _text(value: dict[str, Any], key: str) -> str:
    text = _value(value, key)
    if not isinstance(text, str):
        raise Fault(f"{key!r} must be a string, got {type(text).__name__}", "Put the value in quotes.")
    return _require_encodable(text, key)


def _require_encodable(text: str, key: str) -> str:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = ascii(text[error.start])
            raise Fault(f"{key!r} holds a lone surrogate: {half}", "Write both halves of the surrogate pair.") from None
    return text
