"""A model written as a directory of Hugging Face's: the tensors that the one it came from has, and its other files.

Every rank that owns tensors (`whole_tensors`) writes its own files, and none ever holds more than one of them.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from roll_batching.distributed import consensus, exchange
from roll_batching.errors import CheckpointError
from roll_batching.files import cause
from roll_batching.huggingface.directory import INDEX, SINGLE, files_beside_weights
from roll_batching.huggingface.families import HEAD
from roll_batching.huggingface.stored import DERIVED, StoredTensors
from roll_batching.strategy.checkpoint_files import words
from roll_batching.strategy.checkpoint_folder import whole_or_nothing, write_text
from roll_batching.strategy.checkpoint_writer import check_room
from roll_batching.strategy.state import ModelState
from roll_batching.strategy.weights import gather_parameters
from roll_batching.strategy.whole_tensors import gathered, in_precision, whole_tensors

EXPORTING = "writing the model"
_LARGEST_FILE = 4 * 10**9
"""Bytes; a file holds one tensor at least."""
_HOST = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class _WrittenFile:
    """A file of tensors that one rank wrote."""

    name: str
    tensors: dict[str, int]
    """Bytes by name."""


def export_model(
    state: ModelState,
    source: str,
    path: str | Path,
    *,
    replaces: Callable[[Path], bool] = lambda path: False,
    largest_file: int = _LARGEST_FILE,
) -> None:
    """Writes the model into the folder `path`, in the names, precisions and files of the model directory `source`.

    Collective; `path` is on a file system that all ranks see. It appears when it is whole. A folder that lies there is
    replaced where `replaces` says so, and else refused. Raises RankError on all ranks with what went wrong on any.
    """
    group = state.layout.host_group
    with consensus(group, EXPORTING):
        tensors = whole_tensors(state, source)
    gather_parameters(state.chunks)
    with whole_or_nothing(path, group, what=EXPORTING, replaces=replaces) as folder:
        with consensus(group, EXPORTING):
            if dist.get_rank() == 0:
                check_room(folder, sum(tensors.bytes_of(name) for name in tensors.shapes))
        writer = _Writer(folder, largest_file)
        for placed in tensors.parameters:
            for name, tensor in (gathered(placed, tensors.sizes, _HOST) or {}).items():
                writer.add(name, tensor, tensors.dtypes[name])
        files = exchange(group, EXPORTING, writer.finish)
        with consensus(group, EXPORTING):
            if dist.get_rank() == 0:
                _conclude(folder, tensors.origin, [file for one in files for file in one], tensors.stored)


class _Writer:
    """Writes tensors into files of bounded size. What fails is kept for the end: other ranks go on gathering."""

    def __init__(self, folder: Path, largest: int) -> None:
        self.folder, self.largest = folder, largest
        self.files: list[_WrittenFile] = []
        self._waiting: dict[str, torch.Tensor] = {}
        self._error: Exception | None = None

    def add(self, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
        """One more tensor, in the precision of its file."""
        if self._error is not None:
            return
        try:
            converted = in_precision(name, tensor, dtype)
        except CheckpointError as error:
            self._error = error
            return
        waiting = sum(one.nbytes for one in self._waiting.values())
        if self._waiting and waiting + converted.nbytes > self.largest:
            self._flush()
        self._waiting[name] = converted

    def finish(self) -> list[_WrittenFile]:
        """The files of this rank. Raises CheckpointError when one could not be written."""
        if self._waiting:
            self._flush()
        if self._error is not None:
            raise self._error
        return self.files

    def _flush(self) -> None:
        from safetensors.torch import save_file

        file = self.folder / f"part-{dist.get_rank():05d}-{len(self.files):05d}.safetensors"
        try:
            save_file(self._waiting, file, metadata={"format": "pt"})
            with file.open("rb") as written:
                os.fsync(written.fileno())
        except Exception as error:
            self._error = CheckpointError(f"{file} cannot be written: {words(error)}")
        self.files.append(
            _WrittenFile(name=file.name, tensors={name: tensor.nbytes for name, tensor in self._waiting.items()})
        )
        self._waiting = {}


def _conclude(folder: Path, origin: Path, files: list[_WrittenFile], stored: StoredTensors) -> None:
    """Names the files as transformers does, writes their index, and copies what lies beside the weights."""
    place = {name: number for number, name in enumerate(stored.shapes)}
    files.sort(key=lambda file: min(place[name] for name in file.tensors))
    written = {name for file in files for name in file.tensors}
    left_out = [name for name in stored.shapes if name not in written and not DERIVED.fullmatch(name)]
    if set(left_out) - {HEAD.theirs[0][0]}:
        raise CheckpointError(f"no rank wrote {', '.join(left_out)}")
    names = [SINGLE] if len(files) == 1 else [_part_name(n, len(files)) for n in range(1, len(files) + 1)]
    try:
        for file, name in zip(files, names, strict=True):
            (folder / file.name).rename(folder / name)
        for file_beside in files_beside_weights(origin):
            shutil.copyfile(file_beside, folder / file_beside.name)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {cause(error)}") from None
    if len(files) > 1:
        weight_map = {tensor: name for file, name in zip(files, names, strict=True) for tensor in file.tensors}
        index: Mapping[str, Any] = {
            "metadata": {"total_size": sum(sum(file.tensors.values()) for file in files)},
            "weight_map": dict(sorted(weight_map.items())),
        }
        write_text(folder / INDEX, json.dumps(index, indent=2) + "\n")


def _part_name(number: int, of: int) -> str:
    return f"model-{number:05d}-of-{of:05d}.safetensors"
