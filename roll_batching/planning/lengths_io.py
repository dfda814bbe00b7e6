"""Sequence lengths from CSV, JSONL, JSON, npy and Parquet files."""

from __future__ import annotations

import csv
import json
import re
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from roll_batching.errors import DataError
from roll_batching.planning.arrays import Ints
from roll_batching.planning.length_columns import Column, choose_columns

MOST_TOKENS = 2**31 - 1
"""Most tokens of one sequence: offsets into a pack are int32."""
MOST_ROWS = 10_000_000
LONGEST_LINE = 1024 * 1024
_LARGEST_ARRAY = 256 * 2**20
"""Bytes of a JSON array, which is read into memory as a whole."""

Table = dict[str, Column]

_OTHER_SEPARATOR = re.compile(r"\s*\d+\s*([;|\t]).*")
"""A row that begins with a number and a separator other than a comma."""
_THOUSANDS = re.compile(r"-?\d{1,3}(,\d{3})+")


@dataclass(frozen=True)
class LengthFile:
    """Lengths (int64[n], 1 to 2^31 - 1), the columns that they sum, and why others are left out."""

    lengths: Ints
    columns: tuple[str, ...]
    left_out: Mapping[str, str]
    others: Mapping[str, Ints]
    """Further columns that were asked for, int64[n] each."""


def read_lengths(path: str | Path, columns: Sequence[str] = ()) -> Ints:
    """Lengths (int64[n]) of `read_length_file`."""
    return read_length_file(path, columns).lengths


def read_length_file(path: str | Path, columns: Sequence[str] = (), others: Sequence[str] = ()) -> LengthFile:
    """Read lengths from CSV or text, JSON, npy or Parquet: the sum of `columns`, or of columns named like lengths.

    `others` are further columns of integers to read.

    CSV and text: names in the first line, else the columns are "1", "2", ... JSON: lines, or one array, of numbers
    ("length") or of objects. npy: one column ("length") or several ("1", "2", ...). Parquet needs pyarrow. Raises
    `DataError` with the file and the line or row for values that are not integers, below 0 or beyond int32, rows of
    length 0, more than 10,000,000 rows, and columns that cannot be chosen (`choose_columns`).
    """
    file = Path(path)
    if not file.is_file():
        raise DataError(f"{file} does not exist or is not a file: check its path")
    readers: dict[str, Callable[[Path], Table]] = {
        ".npy": _read_npy,
        ".parquet": _read_parquet,
        ".jsonl": _read_jsonl,
        ".ndjson": _read_jsonl,
    }
    try:
        text_reader = _read_jsonl if _begins_with(file, "[", "{") else _read_csv
        table = readers.get(file.suffix.lower(), text_reader)(file)
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}") from None
    if not table or not any(values is None or len(values) for values in table.values()):
        raise DataError(f"{file} holds no lengths: write one length per line")
    try:
        other_names = choose_columns(table, others).columns if others else ()
        choice = choose_columns(table, columns)
    except DataError as error:
        message = str(error)
        if readers.get(file.suffix.lower()) is None and len(table) > 1 and all(name.isdecimal() for name in table):
            message += ". The first line holds no names, and ',' separates columns: write 1,024 as 1024"
        raise DataError(message if message.startswith(str(file)) else f"{file}: {message}") from None
    chosen = {name: _checked(file, name, table[name]) for name in choice.columns}
    lengths: Ints = np.stack(list(chosen.values())).sum(axis=0)
    _check_rows(file, "as its length", lengths, at_least=1)
    return LengthFile(
        lengths, choice.columns, choice.left_out, {name: _checked(file, name, table[name]) for name in other_names}
    )


def _checked(file: Path, name: str, values: Any) -> Ints:
    if len(values) > MOST_ROWS:
        raise DataError(f"{file} has {len(values):,} rows; at most {MOST_ROWS:,} can be planned at once")
    _check_rows(file, f"in column {name!r}", values, at_least=0)
    return np.asarray(values, dtype=np.int64)


def _check_rows(file: Path, where: str, values: Any, at_least: int) -> None:
    wrong = np.flatnonzero((values < at_least) | (values > MOST_TOKENS))
    if len(wrong):
        row = int(wrong[0])
        raise DataError(
            f"{file}: row {row + 1} has {int(values[row])} {where}; a sequence has 1 to {MOST_TOKENS:,} tokens"
        )


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    """Lines of a text file, with numbers from 1."""
    number = 0
    with file.open(encoding="utf-8-sig", newline="") as stream:
        try:
            while line := stream.readline(LONGEST_LINE + 1):
                number += 1
                if len(line) > LONGEST_LINE:
                    fault = f"the line has more than {LONGEST_LINE:,} characters"
                    raise DataError(f"{file}:{number}: {fault}; write one row per line")
                if number > MOST_ROWS + 1:
                    raise DataError(f"{file} has more than {MOST_ROWS:,} lines; plan fewer at once")
                yield number, line
        except UnicodeDecodeError as error:
            fault = f"no UTF-8 text from about line {number + 1} on: {error.reason}"
            raise DataError(f"{file}: {fault}; save the file as UTF-8") from None


def _read_csv(file: Path) -> Table:
    names: list[str] = []
    columns: list[array[int]] = []
    faults: dict[int, str | None] = {}
    number = 0

    def lines() -> Iterator[str]:
        nonlocal number
        for number, line in _lines(file):  # noqa: B007 (the reader's own count is that of records)
            yield line

    try:
        for row in csv.reader(lines()):
            if not any(value.strip() for value in row):
                continue
            _check_separators(file, number, row)
            if not names:
                names = _header(file, number, row)
                columns = [array("q") for _ in names]
                if any(_integer(value) is None for value in row):
                    continue
            if len(row) != len(names):
                line = ",".join(row)
                fix = f"write {line.replace(',', '')} for one number" if _THOUSANDS.fullmatch(line) else "',' separates"
                raise DataError(
                    f"{file}:{number}: {_short(line)} has {len(row)} columns, the first row {len(names)}; {fix}"
                )
            for place, value in enumerate(row):
                integer = _integer(value)
                if integer is None and place not in faults:
                    kind = "integer within 64 bits" if value.strip().removeprefix("-").isdecimal() else "integer"
                    fault = f"{file}:{number}: {_short(value)} is not an {kind} (column {names[place]!r})"
                    faults[place] = fault if len(columns[place]) else _fault_of_first(value, fault)
                columns[place].append(0 if integer is None else integer)
    except csv.Error as error:
        raise DataError(f"{file}:{number}: {error}") from None
    return {name: faults.get(place, np.array(columns[place])) for place, name in enumerate(names)}


def _check_separators(file: Path, number: int, row: list[str]) -> None:
    """Raise `DataError` for numbers separated by another character, and for 1,024 as one number."""
    other = _OTHER_SEPARATOR.fullmatch(row[0].strip()) if len(row) == 1 else None
    if other is not None:
        raise DataError(
            f"{file}:{number}: {_short(row[0])} has {other[1]!r} between its values; in CSV ',' separates: replace it"
        )
    line = ",".join(row)
    for value in row if not any(re.fullmatch("0\\d\\d", part) for part in row[1:]) else (line,):
        if _THOUSANDS.fullmatch(value.strip()):
            raise DataError(f"{file}:{number}: {_short(value)} has ',' within a number; write {value.replace(',', '')}")


def _header(file: Path, number: int, row: list[str]) -> list[str]:
    """Column names: those of the first row, or numbers if it holds integers only."""
    if all(_integer(value) is not None for value in row):
        return [str(place + 1) for place in range(len(row))]
    for value in row:
        if _integer(value) is not None:
            raise DataError(
                f"{file}:{number}: {_short(','.join(row))} mixes names and numbers: the first line must hold only "
                "column names, or only numbers like the lines after it"
            )
        if _is_number(value):
            raise DataError(f"{file}:{number}: {_short(value)} is neither an integer nor a column's name; correct it")
    names = [value.strip() for value in row]
    for name in names:
        if names.count(name) > 1:
            raise DataError(f"{file}:{number}: two columns are named {_short(name)}; rename one")
    return names


def _is_number(text: Any) -> bool:
    try:
        float(text)
    except (ValueError, TypeError):
        return False
    return True


def _integer(text: str) -> int | None:
    """Integer of at most 64 bits in `text`, or None."""
    text = text.strip()
    if not text.removeprefix("-").isdecimal() or len(text) > 19:
        return None
    value = int(text)
    return value if -(2**63) <= value < 2**63 else None


def _read_jsonl(file: Path) -> Table:
    columns: dict[str, array[int]] = {}
    faults: dict[str, str | None] = {}
    rows = 0
    for number, line, value in _json_values(file):
        row = value if isinstance(value, dict) else {"length": value}
        rows += 1
        for name in (name for name in row if name not in columns):
            columns[name] = array("q", bytes(8 * (rows - 1)))
            if rows > 1:
                faults.setdefault(name, f"{file}:{number}: {name!r} is not in every line")
        for name, values in columns.items():
            integer = row.get(name)
            if isinstance(integer, bool) or not isinstance(integer, int) or not -(2**63) <= integer < 2**63:
                fault = f"{file}:{number}: no integer under {name!r} in {_short(line)}"
                faults.setdefault(name, _fault_of_first(integer, fault) if rows == 1 else fault)
                integer = 0
            values.append(integer)
    if not any(len(row) for row in columns.values()) and rows:
        raise DataError(f"{file}: its lines hold no values: write the length of one sequence per line")
    return {name: faults.get(name, np.array(values)) for name, values in columns.items()}


def _json_values(file: Path) -> Iterator[tuple[int, str, Any]]:
    """Number, text and value of each line that is not blank, or of each item of a file that is one JSON array."""
    rows = _array(file) if _begins_with(file, "[") else None
    if rows is not None:
        yield from ((number, json.dumps(row), row) for number, row in enumerate(rows, 1))
        return
    for number, line in _lines(file):
        if line.strip():
            yield number, line.strip(), _parsed(file, number, line.strip())


def _begins_with(file: Path, *marks: str) -> bool:
    with file.open(encoding="utf-8-sig", errors="replace") as stream:
        return stream.read(4096).lstrip().startswith(marks)


def _array(file: Path) -> list[Any] | None:
    """The items of a file that is one JSON array; None for lines that are arrays."""
    if file.stat().st_size > _LARGEST_ARRAY:
        raise DataError(f"{file} is a JSON array of more than {_LARGEST_ARRAY // 2**20} MiB: write one row per line")
    text = file.read_text(encoding="utf-8-sig", errors="replace")
    try:
        _, end = json.JSONDecoder().raw_decode(text.lstrip())
    except (ValueError, RecursionError):
        end = 0
    return None if end and text.lstrip()[end:].strip() else _parsed(file, 1, text)


def _parsed(file: Path, number: int, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        line = number + getattr(error, "lineno", 1) - 1
        raise DataError(f"{file}:{line}: not JSON ({getattr(error, 'msg', 'nested too deep')})") from None


def _read_npy(file: Path) -> Table:
    try:
        lengths = np.load(file, allow_pickle=False, mmap_mode="r")
    except (ValueError, OSError, EOFError, TypeError, KeyError, OverflowError, MemoryError, SyntaxError):
        raise DataError(f"{file} is not an npy file of numbers: write it with np.save") from None
    if not isinstance(lengths, np.ndarray) or lengths.ndim not in (1, 2) or lengths.dtype.kind not in "iu":
        described = f"shape {lengths.shape}, {lengths.dtype}" if isinstance(lengths, np.ndarray) else "an archive"
        raise DataError(f"{file} holds no column of integers (found {described}): save integers of shape [n]")
    if lengths.ndim == 1:
        return {"length": lengths}
    if lengths.shape[1] > 1000:
        raise DataError(
            f"{file} has {lengths.shape[1]:,} columns; each row is one sequence: save one length per row (shape [n])"
        )
    return {str(place + 1): column for place, column in enumerate(lengths.T)}


def _read_parquet(file: Path) -> Table:
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise DataError(
            f"{file}: reading Parquet needs pyarrow: pip install 'roll-batching[parquet]', or convert the file to CSV"
        ) from None
    try:
        opened = parquet.ParquetFile(file)
        if opened.metadata.num_rows > MOST_ROWS:
            raise DataError(
                f"{file} has {opened.metadata.num_rows:,} rows; at most {MOST_ROWS:,} can be planned at once"
            )
        schema = opened.schema_arrow
        names = [field.name for field in schema if pyarrow.types.is_integer(field.type)]
        if len(set(schema.names)) < len(schema.names):
            raise DataError(f"{file} has two columns with one name: {', '.join(schema.names)}")
        table = opened.read(columns=names)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{file} is not a Parquet file: {error}") from None
    if not names:
        raise DataError(f"{file} has no integer column (columns: {', '.join(schema.names)}): save lengths as integers")
    result: Table = dict.fromkeys(schema.names)
    for name in names:
        nulls = table[name].null_count
        result[name] = f"{file}: {nulls} rows have no value in column {name!r}" if nulls else table[name].to_numpy()
    return result


def _fault_of_first(value: Any, fault: str) -> str | None:
    """`fault`, or None where the first `value` is text, a list or an object: the column then holds no lengths."""
    return None if isinstance(value, str | list | dict) and not _is_number(value) else fault


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}...")
