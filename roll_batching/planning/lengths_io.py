"""Sequence lengths from files."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from roll_batching.errors import DataError
from roll_batching.planning.inputs import Ints

Reader = Callable[[Path, tuple[str, ...]], Mapping[str, ArrayLike]]
"""From a file and the names of the wanted columns (none: all) to columns by name."""


def read_lengths(path: str | Path, columns: Sequence[str] = ()) -> Ints:
    """Lengths (int64[n]) from CSV or text, JSONL, npy or Parquet: the sum of `read_columns`.

    Raises `DataError` as that does, and for rows below 1.
    """
    return sum_columns(read_columns(path, columns), path)


def sum_columns(table: Mapping[str, Ints], path: str | Path) -> Ints:
    """The sum of a file's columns (int64[n]); `DataError` for rows below 1."""
    lengths: Ints = np.sum(list(table.values()), axis=0)
    if lengths.min() < 1:
        row = int(np.argmin(lengths))
        raise DataError(f"{path}: row {row + 1} has length {lengths[row]}; every sequence has at least one token")
    return lengths


def read_columns(path: str | Path, columns: Sequence[str] = ()) -> dict[str, Ints]:
    """The columns `columns` of a file, or all that hold integers, by name (int64[n] each, at least one row).

    CSV and text: names are in the first line, or else the columns' numbers from 1; without `columns` every cell
    must be an integer. JSONL: a number per line ("length"), or objects, each with the same integers. npy: one
    column ("length") or several ("1", "2", ...). Parquet needs pyarrow. Raises `DataError` naming the file and
    the line.
    """
    file = Path(path)
    if not file.is_file():
        raise DataError(f"{file} does not exist or is no file")
    readers: dict[str, Reader] = {
        ".npy": _read_npy,
        ".parquet": _read_parquet,
        ".jsonl": _read_jsonl,
        ".ndjson": _read_jsonl,
    }
    try:
        table = readers.get(file.suffix.lower(), _read_csv)(file, tuple(columns))
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is no text: {error.reason} at byte {error.start}") from None
    arrays = {name: np.asarray(values, dtype=np.int64) for name, values in table.items()}
    if not arrays or not len(next(iter(arrays.values()))):
        raise DataError(f"{file} holds no lengths")
    return arrays


def _chosen(file: Path, names: Sequence[str], columns: tuple[str, ...]) -> list[str]:
    """The wanted ones of the columns that there are."""
    for name in columns:
        if name not in names:
            raise DataError(f"{file} has no column of integers {name!r}; it has {', '.join(names) or 'none'}")
    return list(columns or names)


def _read_csv(file: Path, columns: tuple[str, ...]) -> dict[str, list[int]]:
    table: dict[str, list[int]] = {}
    places: list[int] = []
    width = 0
    with file.open(newline="") as stream:
        for number, row in enumerate(csv.reader(stream), start=1):
            if not any(value.strip() for value in row):
                continue
            if not width:
                width = len(row)
                headed = not all(_is_integer(value) for value in row)
                names = [value.strip() for value in row] if headed else [str(i + 1) for i in range(width)]
                table = {name: [] for name in _chosen(file, names, columns)}
                places = [names.index(name) for name in table]
                if headed:
                    continue
            if len(row) != width:
                raise DataError(f"{file}:{number}: {','.join(row)!r} has {len(row)} columns, the first row {width}")
            for place, values in zip(places, table.values(), strict=True):
                if not _is_integer(row[place]):
                    raise DataError(f"{file}:{number}: {','.join(row)!r} is no row of integers")
                values.append(int(row[place]))
    return table


def _is_integer(text: str) -> bool:
    return text.strip().removeprefix("-").isdecimal()


def _read_jsonl(file: Path, columns: tuple[str, ...]) -> dict[str, list[int]]:
    table: dict[str, list[int]] = {}
    names: list[str] = []
    for number, line in enumerate(file.read_text().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{file}:{number}: no JSON ({error.msg})") from None
        named = value if isinstance(value, dict) else {"length": value}
        integers = {key: one for key, one in named.items() if isinstance(one, int) and not isinstance(one, bool)}
        if not integers:
            raise DataError(f"{file}:{number}: no integer in {line.strip()[:60]!r}")
        if not table:
            names = sorted(integers)
            table = {name: [] for name in _chosen(file, names, columns)}
        if not set(table) <= set(integers) or (not columns and sorted(integers) != names):
            raise DataError(
                f"{file}:{number}: integers under {', '.join(sorted(integers))}; the first line has them under "
                f"{', '.join(names)}"
            )
        for name, values in table.items():
            values.append(integers[name])
    return table


def _read_npy(file: Path, columns: tuple[str, ...]) -> dict[str, Ints]:
    try:
        lengths = np.load(file, allow_pickle=False)
    except (ValueError, OSError, EOFError):
        raise DataError(f"{file} is no npy file of numbers") from None
    if lengths.ndim not in (1, 2) or lengths.dtype.kind not in "iu":
        raise DataError(f"{file} holds no column of integers (found shape {lengths.shape}, {lengths.dtype})")
    if lengths.ndim == 1:
        table = {"length": lengths}
    else:
        table = {str(i + 1): column for i, column in enumerate(lengths.T)}
    return {name: table[name] for name in _chosen(file, list(table), columns)}


def _read_parquet(file: Path, columns: tuple[str, ...]) -> dict[str, Ints]:
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise DataError(
            f"{file}: reading Parquet needs pyarrow: pip install 'roll-batching[parquet]', or convert the file to CSV"
        ) from None
    try:
        table = parquet.read_table(file)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{file} is no Parquet file: {error}") from None
    names = [field.name for field in table.schema if pyarrow.types.is_integer(field.type)]
    if not names:
        raise DataError(f"{file} has no integer column (columns: {', '.join(table.column_names)})")
    chosen = _chosen(file, names, columns)
    for name in chosen:
        if table[name].null_count:
            raise DataError(f"{file}: {table[name].null_count} rows have no value in column {name!r}")
    return {name: table[name].to_numpy() for name in chosen}
