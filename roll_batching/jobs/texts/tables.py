"""Tables of texts, row by row: Parquet files, JSON arrays, and folders that Hugging Face's `datasets` saved."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_STATE, _SPLITS = "state.json", "dataset_dict.json"
_PARQUET, _ARRAY = b"PAR1", re.compile(rb"\s*\[\s*\{")
_START = 4096
"""Bytes at the beginning of a file that tell its format; white space may precede an array."""
_BATCH_SIZE = 1024
"""Rows that are converted to Python objects together."""


class TableError(Exception):
    """A fault of a table, and its cure."""

    def __init__(self, what: str, cure: str) -> None:
        self.what, self.cure = what, cure


@dataclass(frozen=True)
class Table:
    """A Parquet file, a folder of `datasets`, or a JSON array, which is read into memory as a whole."""

    path: Path
    is_array: bool = False

    def rows(self, read: Callable[[int], None] = lambda size: None) -> Iterator[Any]:
        """The rows as plain data, without null keys of messages and tools. `read` is called with bytes read.

        Raises TableError: without pyarrow, for a folder of several splits, for an invalid file.
        """
        if self.is_array:
            yield from _of_array(self.path, read)
            return
        try:
            import pyarrow
        except ImportError:
            raise TableError("is a table, which needs pyarrow", "pip install 'roll-batching[parquet]'.") from None
        try:
            if self.path.is_dir():
                batches = _of_arrow(self.path, read)
            else:
                batches = _of_parquet(self.path, read)
            for batch in batches:
                yield from (_drop_null_keys(row) for row in batch.to_pylist())
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise TableError(f"cannot be read as a table ({error})", "Write it again, or give JSON Lines.") from None


def table_of(path: Path) -> Table | None:
    """The table at `path`; None for another kind of file, or none."""
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


def _of_array(path: Path, read: Callable[[int], None]) -> Iterator[Any]:
    cure = "Write it again, or give JSON Lines."
    try:
        rows = json.loads(path.read_bytes())
    except RecursionError:
        raise TableError("is a JSON array that is nested too deeply", cure) from None
    except (ValueError, OSError) as error:
        raise TableError(f"begins as a JSON array, but is not valid ({error})", cure) from None
    read(path.stat().st_size)
    yield from rows


def _of_parquet(path: Path, read: Callable[[int], None]) -> Iterator[Any]:
    import pyarrow.parquet as parquet

    file = parquet.ParquetFile(path)
    size, count = path.stat().st_size, max(file.metadata.num_rows, 1)
    for batch in file.iter_batches(batch_size=_BATCH_SIZE):
        read(size * batch.num_rows // count)
        yield batch


def _of_arrow(folder: Path, read: Callable[[int], None]) -> Iterator[Any]:
    import pyarrow

    if not (folder / _STATE).is_file():
        splits = ", ".join(json.loads((folder / _SPLITS).read_text(encoding="utf-8"))["splits"])
        raise TableError(f"holds several splits ({splits})", f"Name one: {folder}/NAME.")
    state = json.loads((folder / _STATE).read_text(encoding="utf-8"))
    for name in [entry["filename"] for entry in state["_data_files"]]:
        file = folder / name
        with pyarrow.memory_map(str(file)) as source:
            for batch in pyarrow.ipc.open_stream(source):
                read(batch.nbytes)
                for start in range(0, batch.num_rows, _BATCH_SIZE):
                    yield batch.slice(start, _BATCH_SIZE)


def _drop_null_keys(value: Any) -> Any:
    """`value` without null keys of nested objects: a column of a table gives every row the keys of all rows."""
    if not isinstance(value, dict):
        return value
    return {
        key: [_non_null(item) for item in inner] if isinstance(inner, list) else inner for key, inner in value.items()
    }


def _non_null(item: Any) -> Any:
    if isinstance(item, dict):
        return {key: _non_null(inner) for key, inner in item.items() if inner is not None}
    return [_non_null(inner) for inner in item] if isinstance(item, list) else item
