"""Reads slices of the tensors in a model directory's safetensors files.

Only requested rows are read, in blocks through one small buffer, so a rank's memory holds its shard and little more.
Files are not memory-mapped: mapped pages count as memory of the process, and are fetched late.
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
from roll_batching.files import cause, open_regular
from roll_batching.huggingface.directory import INDEX, SINGLE, read_json

_BLOCK_BYTES = 4 * 2**20
"""Size of a read."""
DERIVED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
"""Tensors of older checkpoints that are computed from `config.json`, and ignored."""
_INDEX = r"(?<=\.)\d+(?=\.)"
"""A number between dots, as of a layer or an expert."""


class StoredTensors:
    """The tensors in the safetensors files of a directory.

    Raises CheckpointError if there are no such files or one cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files: dict[str, Path] = {}
        """The file of each tensor."""
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        """Names of safetensors: F32, BF16."""
        self._first: dict[str, int] = {}
        """Offset of each tensor in its file, in bytes."""
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
        """Errors for tensors that are missing, unknown, or of another shape than `expected` (by name).

        Tensors named in `redundant` may exist.
        """
        missing = [name for name in expected if name not in self.shapes]
        extra = [x for x in self.shapes if x not in expected and x not in redundant and not DERIVED.fullmatch(x)]
        problems = [f"{name} is missing" for name in ranges(missing)]
        problems += [f"{name} is not part of this model" for name in ranges(extra)]
        by_shape: dict[tuple[Any, Any], list[str]] = defaultdict(list)
        for name, shape in expected.items():
            if name in self.shapes and self.shapes[name] != shape:
                by_shape[self.shapes[name], shape].append(name)
        for (stored, wanted), names in by_shape.items():
            problems += [f"{name} is {list(stored)}, not {list(wanted)}" for name in ranges(names)]
        return problems

    def bytes_of(self, name: str) -> int:
        """Size of a tensor in its file."""
        return math.prod(self.shapes[name]) * int(torch_dtype(self.dtypes[name]).itemsize)

    def read(self, name: str, rows: slice, columns: slice | None = None) -> Iterator[tuple[slice, Any]]:
        """Rows (and columns) of a tensor in blocks: each block's rows within the request, and its values.

        The values are a torch tensor on the host, valid until the next block is requested.
        """
        import torch

        dtype, shape = torch_dtype(self.dtypes[name]), self.shapes[name]
        size = math.prod(shape[1:]) * dtype.itemsize
        step = max(_BLOCK_BYTES // max(size, 1), 1)
        for start in range(rows.start, rows.stop, step):
            count = min(step, rows.stop - start)
            if len(self._buffer) < count * size:
                self._buffer = bytearray(count * size)
            self._fetch(name, start * size, memoryview(self._buffer)[: count * size])
            values = torch.frombuffer(self._buffer, dtype=dtype, count=count * size // dtype.itemsize)
            values = values.view(count, *shape[1:])
            region = slice(start - rows.start, start - rows.start + count)
            yield region, values if columns is None else values[:, columns]

    def _fetch(self, name: str, offset: int, into: memoryview) -> None:
        """Fills `into` with the bytes of a tensor from `offset` on."""
        file = self.files[name]
        try:
            if self._opened is None or self._opened.name != str(file):
                if self._opened is not None:
                    self._opened.close()
                self._opened = io.FileIO(str(file))
            self._opened.seek(self._first[name] + offset)
            while into:
                count = self._opened.readinto(into)
                if not count:
                    raise CheckpointError(f"{file} is truncated: it ends inside {name}; copy it again")
                into = into[count:]
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {cause(error)}") from None

    def close(self) -> None:
        """Closes the last file and frees the buffer."""
        if self._opened is not None:
            self._opened.close()
        self._opened, self._buffer = None, bytearray()


def torch_dtype(name: str) -> Any:
    """The torch dtype of a safetensors dtype. Raises CheckpointError for an unsupported one."""
    import torch

    known = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    if name not in known:
        raise CheckpointError(f"tensors of dtype {name} are not supported: convert them to one of {', '.join(known)}")
    return known[name]


def _files(path: Path) -> list[Path]:
    """The safetensors files of a directory, by its index or as a single file. Raises CheckpointError without any."""
    if (path / INDEX).is_file():
        weight_map = read_json(path / INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise CheckpointError(f"{path / INDEX} has no weight_map: save the model again with save_pretrained")
        for name in weight_map.values():
            _check_inside(path / INDEX, name)
        return [path / name for name in sorted(set(weight_map.values()))]
    if (path / SINGLE).is_file():
        return [path / SINGLE]
    pickled = next(iter(sorted(path.glob("*.bin"))), None)
    if pickled is not None:
        raise CheckpointError(
            f"{path} holds {pickled.name}, a pickle, which is not read: convert it to safetensors with transformers' "
            "from_pretrained and save_pretrained"
        )
    raise CheckpointError(f"{path} holds neither {SINGLE} nor {INDEX}: name a directory with safetensors files")


def _check_inside(index: Path, name: Any) -> None:
    """Raises CheckpointError unless `name` is a path below the directory of `index`.

    The file itself may be a link that leads elsewhere: Hugging Face's cache links to its blobs.
    """
    inside = isinstance(name, str) and "\0" not in name and name not in ("", ".")
    if not inside or Path(name).is_absolute() or ".." in Path(name).parts:
        raise CheckpointError(f"{index} names {repr(name)[:200]} as a weights file; name files inside its directory")


def _header(file: Path) -> tuple[int, dict[str, Any]]:
    """Offset of a file's data, and its header: `dtype`, `shape` and `data_offsets` of each tensor."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise CheckpointError(
            f"{file} needs the package safetensors ({error}): pip install 'roll-batching[hf]'"
        ) from None
    try:
        with open_regular(file) as opened, safe_open(str(file), framework="pt"):  # checks header and file size
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(length))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from None
    header.pop("__metadata__", None)
    return 8 + length, header


def ranges(names: Iterable[str]) -> list[str]:
    """Names with numbers collapsed into ranges: `model.layers.0-27.mlp.up_proj.weight`."""
    by_pattern: dict[str, list[tuple[int, ...]]] = defaultdict(list)
    for name in names:
        by_pattern[re.sub(_INDEX, "*", name)].append(tuple(map(int, re.findall(_INDEX, name))))
    collapsed = []
    for pattern, numbers in by_pattern.items():
        columns = [sorted(set(column)) for column in zip(*numbers, strict=True)]
        is_full_grid = set(itertools.product(*columns)) == set(numbers)
        for entry in [columns] if is_full_grid else [[[n] for n in column_numbers] for column_numbers in numbers]:
            pairs = itertools.zip_longest(pattern.split("*"), map(_runs, entry), fillvalue="")
            collapsed.append("".join(letter for pair in pairs for letter in pair))
    return collapsed


def _runs(numbers: list[int]) -> str:
    """Ascending numbers as ranges: `0-3,7`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
