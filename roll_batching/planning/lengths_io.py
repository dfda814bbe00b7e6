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
    line of names is skipped. JSONL: a number per line, or an object whose integers are summed. Parquet needs
    pyarrow; its integer columns are summed. Raises `DataError` naming the file and the line.
    """
    file = Path(path)
    if not file.is_file():
        raise DataError(f"{file} does not exist or is no file")
    suffix = file.suffix.lower()
    if suffix == ".npy":
        lengths = np.load(file, allow_pickle=False)
        lengths = lengths.sum(axis=1) if lengths.ndim == 2 else lengths
    elif suffix == ".parquet":
        lengths = _read_parquet(file)
    elif suffix in (".jsonl", ".ndjson"):
        lengths = _read_jsonl(file)
    else:
        lengths = _read_csv(file)
    lengths = np.asarray(lengths)
    if lengths.ndim != 1 or len(lengths) == 0 or lengths.dtype.kind not in "iu":
        raise DataError(f"{file} holds no column of integers (found shape {lengths.shape}, {lengths.dtype})")
    if lengths.min() < 1:
        row = int(np.argmin(lengths))
        raise DataError(f"{file}: row {row + 1} has length {lengths[row]}; every sequence has at least one token")
    return lengths.astype(np.int64)


def _read_csv(file: Path) -> list[int]:
    lengths: list[int] = []
    with file.open(newline="") as stream:
        for number, row in enumerate(csv.reader(stream), start=1):
            values = [value.strip() for value in row if value.strip()]
            if not values:
                continue
            try:
                lengths.append(sum(int(value) for value in values))
            except ValueError:
                if number > 1:
                    raise DataError(f"{file}:{number}: {','.join(row)!r} is no row of integers") from None
    return lengths


def _read_jsonl(file: Path) -> list[int]:
    lengths: list[int] = []
    for number, line in enumerate(file.read_text().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{file}:{number}: no JSON ({error.msg})") from None
        numbers = list(value.values()) if isinstance(value, dict) else [value]
        integers = [one for one in numbers if isinstance(one, int) and not isinstance(one, bool)]
        if not integers:
            raise DataError(f"{file}:{number}: no integer in {line.strip()[:60]!r}")
        lengths.append(sum(integers))
    return lengths


def _read_parquet(file: Path) -> Ints:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise DataError(
            f"{file}: reading Parquet needs pyarrow: pip install 'roll-batching[parquet]', or convert the file to CSV"
        ) from None
    table = parquet.read_table(file)
    columns = [table[name].to_numpy() for name in table.column_names if table[name].to_numpy().dtype.kind in "iu"]
    if not columns:
        raise DataError(f"{file} has no integer column (columns: {', '.join(table.column_names)})")
    total: Ints = np.sum(columns, axis=0)
    return total
