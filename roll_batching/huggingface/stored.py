"""The safetensors files of a model directory: which tensors they hold, and slices of them.

Only what is asked for is read, in parts, and a file is mapped anew after some of them: a rank's memory holds its own
shard and little more.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from roll_batching.errors import CheckpointError
from roll_batching.huggingface.directory import INDEX, SINGLE, read_json

_AT_ONCE, _MAPPED = 16 * 2**20, 64 * 2**20
"""Bytes that are read together, and after which a file is opened anew: the pages that were read count as this process's
memory until then."""
DERIVED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
"""Tensors of old checkpoints that follow from `config.json`."""


class StoredTensors:
    """The tensors in the safetensors files of a directory.

    Raises CheckpointError when there are no such files, or when one cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files: dict[str, Path] = {}
        """Where each tensor lies."""
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        """In safetensors' words: F32, BF16."""
        self._places: dict[str, tuple[int, int]] = {}
        """First byte of each tensor in its file, and how many it has."""
        for file in _files(path):
            start, header = _header(file)
            for name, entry in header.items():
                self.files[name] = file
                self.shapes[name] = tuple(entry["shape"])
                self.dtypes[name] = entry["dtype"]
                first, end = entry["data_offsets"]
                self._places[name] = start + first, end - first
        self._file: Path | None = None
        self._opened: Any = None
        self._touched = 0

    def misfits(self, expected: Mapping[str, tuple[int, ...]], redundant: Collection[str] = ()) -> list[str]:
        """How the tensors differ from those `expected` (name to shape): what is missing, misshapen, and what is more.

        Those named in `redundant` may be there.
        """
        missing = [name for name in expected if name not in self.shapes]
        extra = [name for name in self.shapes if name not in expected and name not in redundant]
        problems = [f"{name} is missing" for name in ranges(missing)]
        problems += [f"{name} is not of this model" for name in ranges(x for x in extra if not DERIVED.fullmatch(x))]
        by_shape: dict[tuple[Any, Any], list[str]] = defaultdict(list)
        for name, shape in expected.items():
            if name in self.shapes and self.shapes[name] != shape:
                by_shape[self.shapes[name], shape].append(name)
        for (there, here), names in by_shape.items():
            problems += [f"{name} is {list(there)}, not {list(here)}" for name in ranges(names)]
        return problems

    def read(self, name: str, rows: slice, columns: slice | None = None) -> Iterator[tuple[slice, Any]]:
        """Rows (and columns) of a tensor, some rows at a time: where they lie among those asked for, and their values.

        The values are on the host, and to be copied, not kept.
        """
        size = self._places[name][1] // max(self.shapes[name][0], 1)  # bytes of a row
        step = max(_AT_ONCE // max(size, 1), 1)
        for start in range(rows.start, rows.stop, step):
            file, some = self.files[name], slice(start, min(start + step, rows.stop))
            if file != self._file or self._touched > _MAPPED:
                self.close()
                self._opened, self._file = _opened(file).__enter__(), file
            part = self._opened.get_slice(name)
            self._touched += (some.stop - some.start) * size
            at = slice(some.start - rows.start, some.stop - rows.start)
            yield at, part[some] if columns is None else part[some, columns]

    def announce(self, name: str, rows: slice) -> None:
        """Rows of a tensor will be read soon: the kernel may begin to fetch them."""
        start, size = self._places[name]
        row = size // max(self.shapes[name][0], 1)
        if hasattr(os, "posix_fadvise"):
            with self.files[name].open("rb") as file:
                length = (rows.stop - rows.start) * row
                os.posix_fadvise(file.fileno(), start + rows.start * row, length, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        """Lets go of the file that was read last."""
        if self._opened is not None:
            self._opened.__exit__(None, None, None)
        self._opened, self._file, self._touched = None, None, 0


def _files(path: Path) -> list[Path]:
    if (path / INDEX).is_file():
        named = read_json(path / INDEX).get("weight_map")
        if not isinstance(named, dict):
            raise CheckpointError(f"{path / INDEX} has no weight_map")
        return [path / name for name in sorted(set(named.values()))]
    if (path / SINGLE).is_file():
        return [path / SINGLE]
    pickled = next(iter(sorted(path.glob("*.bin"))), None)
    if pickled is not None:
        raise CheckpointError(
            f"{path} holds {pickled.name}, which is pickled and not read: write safetensors with transformers, "
            "from_pretrained and then save_pretrained"
        )
    raise CheckpointError(f"{path} holds neither {SINGLE} nor {INDEX}")


def _header(file: Path) -> tuple[int, dict[str, Any]]:
    """Where a file's data begin, and its tensors: `dtype`, `shape` and `data_offsets` of each (the format's header)."""
    _opened(file).__exit__(None, None, None)  # which checks that it is whole
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length))
    header.pop("__metadata__", None)
    return 8 + length, header


def _opened(file: Path) -> Any:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise CheckpointError(
            f"{file} needs the package safetensors ({error}): pip install 'roll-batching[hf]'"
        ) from None
    try:
        return safe_open(str(file), framework="pt", device="cpu")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from None


def ranges(names: Iterable[str]) -> list[str]:
    """Names with those that differ in numbers alone as one, all said: `model.layers.0-27.mlp.up_proj.weight`."""
    alike: dict[str, list[tuple[int, ...]]] = defaultdict(list)
    for name in names:
        alike[re.sub(r"(?<=\.)\d+(?=\.)", "*", name)].append(tuple(map(int, re.findall(r"(?<=\.)\d+(?=\.)", name))))
    said = []
    for pattern, numbers in alike.items():
        columns = [sorted(set(column)) for column in zip(*numbers, strict=True)]
        whole = set(itertools.product(*columns)) == set(numbers)
        for entry in [columns] if whole else [[[n] for n in one] for one in numbers]:
            said.append("".join(_interleaved(pattern.split("*"), [_runs(column) for column in entry])))
    return said


def _interleaved(parts: list[str], between: list[str]) -> list[str]:
    return [text for pair in itertools.zip_longest(parts, between, fillvalue="") for text in pair]


def _runs(numbers: list[int]) -> str:
    """`0-3,7`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
