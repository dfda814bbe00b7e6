"""The safetensors files of a model directory: which tensors they hold, and slices of them.

Only what is asked for is read, some rows at a time into one small buffer, so that a rank's memory holds its own shard
and little more. The files are not mapped: pages of a mapped file count as a process's memory, and are fetched late.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from roll_batching.errors import CheckpointError
from roll_batching.files import cause
from roll_batching.huggingface.directory import INDEX, SINGLE, read_json

_AT_ONCE = 4 * 2**20
"""Bytes that are read together."""
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
        self._first: dict[str, int] = {}
        """Where each tensor begins in its file."""
        for file in _files(path):
            start, header = _header(file)
            for name, entry in header.items():
                self.files[name] = file
                self.shapes[name] = tuple(entry["shape"])
                self.dtypes[name] = entry["dtype"]
                self._first[name] = start + entry["data_offsets"][0]
        self._opened: io.FileIO | None = None
        self._buffer = bytearray()

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

        The values are a torch tensor on the host, to be copied before the next ones are asked for.
        """
        import torch

        dtype, shape = torch_dtype(self.dtypes[name]), self.shapes[name]
        size = math.prod(shape[1:]) * dtype.itemsize
        step = max(_AT_ONCE // max(size, 1), 1)
        for start in range(rows.start, rows.stop, step):
            count = min(step, rows.stop - start)
            if len(self._buffer) < count * size:
                self._buffer = bytearray(count * size)
            self._fetch(name, start * size, memoryview(self._buffer)[: count * size])
            values = torch.frombuffer(self._buffer, dtype=dtype, count=count * size // dtype.itemsize)
            values = values.view(count, *shape[1:])
            at = slice(start - rows.start, start - rows.start + count)
            yield at, values if columns is None else values[:, columns]

    def _fetch(self, name: str, offset: int, into: memoryview) -> None:
        """Bytes of a tensor from `offset` on."""
        file = self.files[name]
        try:
            if self._opened is None or self._opened.name != str(file):
                if self._opened is not None:
                    self._opened.close()
                self._opened = io.FileIO(str(file))
            self._opened.seek(self._first[name] + offset)
            while into:
                done = self._opened.readinto(into)
                if not done:
                    raise CheckpointError(f"{file} is cut off: it ends inside {name}")
                into = into[done:]
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {cause(error)}") from None

    def close(self) -> None:
        """Lets go of the file that was read last, and of the memory that it was read into."""
        if self._opened is not None:
            self._opened.close()
        self._opened, self._buffer = None, bytearray()


def torch_dtype(word: str) -> Any:
    """Torch's precision for safetensors' word. Raises CheckpointError for one that no weights here have."""
    import torch

    known = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    if word not in known:
        raise CheckpointError(f"tensors of {word} are not supported, only {', '.join(known)}")
    return known[word]


def _files(path: Path) -> list[Path]:
    if (path / INDEX).is_file():
        named = read_json(path / INDEX).get("weight_map")
        if not isinstance(named, dict):
            raise CheckpointError(f"{path / INDEX} has no weight_map")
        for name in named.values():
            _check_inside(path / INDEX, name)
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


def _check_inside(index: Path, name: Any) -> None:
    """Raises CheckpointError for what is no path below the directory of `index`; a link in it may lead elsewhere.

    Hugging Face's cache keeps files as links to its blobs.
    """
    inside = isinstance(name, str) and "\0" not in name and name not in ("", ".")
    if not inside or Path(name).is_absolute() or ".." in Path(name).parts:
        raise CheckpointError(f"{index} names {repr(name)[:200]} as a file of weights; name files inside its directory")


def _header(file: Path) -> tuple[int, dict[str, Any]]:
    """Where a file's data begin, and its tensors: `dtype`, `shape` and `data_offsets` of each (the format's header)."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise CheckpointError(
            f"{file} needs the package safetensors ({error}): pip install 'roll-batching[hf]'"
        ) from None
    try:
        with safe_open(str(file), framework="pt"):  # which checks the header, and that the file is whole
            pass
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(length))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from None
    header.pop("__metadata__", None)
    return 8 + length, header


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
