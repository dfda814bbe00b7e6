"""Sequence lengths from files."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np

from roll_batching.errors import DataError
from roll_batching.planning.inputs import Ints


def read_lengths(path: str | Path) -> Ints:
    """Lengths (int64[n]) from CSV or text, JSONL, npy or Parquet; rows of length 0 are refused.

    CSV: one length per line, or several numeric columns that are summed (prompt and response tokens); a first
    line of names is skipped. JSONL: a number per line, or objects of the same keys whose integers are summed.
    Parquet needs pyarrow; its integer columns are summed. Raises `DataError` naming the file and the line.
    """
    file = Path(path)
    if not file.is_file():
        raise DataError(f"{file} does not exist or is no file")
    readers = {".npy": _read_npy, ".parquet": _read_parquet, ".jsonl": _read_jsonl, ".ndjson": _read_jsonl}
    try:
        lengths = np.asarray(readers.get(file.suffix.lower(), _read_csv)(file))
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is no text: {error.reason} at byte {error.start}") from None
    if len(lengths) == 0:
        raise DataError(f"{file} holds no lengths")
    if lengths.min() < 1:
        row = int(np.argmin(lengths))
        raise DataError(f"{file}: row {row + 1} has length {lengths[row]}; every sequence has at least one token")
    return lengths.astype(np.int64)


def _read_csv(file: Path) -> list[int]:
    lengths: list[int] = []
    width = 0
    with file.open(newline="") as stream:
        for number, row in enumerate(csv.reader(stream), start=1):
            if not any(value.strip() for value in row):
                continue
            width = width or len(row)
            if len(row) != width:
                raise DataError(f"{file}:{number}: {','.join(row)!r} has {len(row)} columns, the first row {width}")
            try:
                lengths.append(sum(int(value) for value in row))
            except ValueError:
                if number > 1:
                    raise DataError(f"{file}:{number}: {','.join(row)!r} is no row of integers") from None
    return lengths


def _read_jsonl(file: Path) -> list[int]:
    lengths: list[int] = []
    expected: list[str] = []
    for number, line in enumerate(file.read_text().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{file}:{number}: no JSON ({error.msg})") from None
        named = value if isinstance(value, dict) else {"": value}
        integers = {key: one for key, one in named.items() if isinstance(one, int) and not isinstance(one, bool)}
        if not integers:
            raise DataError(f"{file}:{number}: no integer in {line.strip()[:60]!r}")
        expected = expected or sorted(integers)
        if sorted(integers) != expected:
            raise DataError(
                f"{file}:{number}: integers under {', '.join(sorted(integers))}; the first line has them under "
                f"{', '.join(expected)}"
            )
        lengths.append(sum(integers.values()))
    return lengths


def _read_npy(file: Path) -> Ints:
    try:
        lengths = np.load(file, allow_pickle=False)
    except (ValueError, OSError, EOFError):
        raise DataError(f"{file} is no npy file of numbers") from None
    if lengths.ndim not in (1, 2) or lengths.dtype.kind not in "iu":
        raise DataError(f"{file} holds no column of integers (found shape {lengths.shape}, {lengths.dtype})")
    return lengths.reshape(len(lengths), -1).sum(axis=1)


def _read_parquet(file: Path) -> Ints:
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
    for name in names:
        if table[name].null_count:
            raise DataError(f"{file}: {table[name].null_count} rows have no value in column {name!r}")
    total: Ints = np.sum([table[name].to_numpy().astype(np.int64) for name in names], axis=0)
    return total
