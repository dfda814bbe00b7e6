"""Export of a model as a Hugging Face directory, with the tensors and other files of the one it came from.

Every rank that owns full tensors (`full_tensors`) writes its own files, and holds one of them at a time.
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
from roll_batching.huggingface.layer_rules import HEAD
from roll_batching.huggingface.stored import DERIVED, StoredTensors, torch_dtype
from roll_batching.strategy.checkpoint_files import alone, describe_cause
from roll_batching.strategy.checkpoint_folder import atomic_folder, write_text
from roll_batching.strategy.checkpoint_writer import check_free_space
from roll_batching.strategy.full_tensors import cast_to_file_dtype, describe_full_tensors, gather_full_tensors
from roll_batching.strategy.model_state import ModelState
from roll_batching.strategy.weights import gather_parameters

EXPORTING = "writing the model"
_LARGEST_FILE = 4 * 10**9
"""Bytes of a file at most; a larger tensor has a file to itself."""
_HOST = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class _WrittenFile:
    """A safetensors file of one rank."""

    name: str
    tensors: dict[str, int]
    """Bytes of each tensor."""


def export_model(
    state: ModelState,
    source: str,
    path: str | Path,
    *,
    replaces: Callable[[Path], bool] = lambda path: False,
    with_head: bool = False,
    largest_file: int = _LARGEST_FILE,
) -> None:
    """Writes the model into the folder `path`, with the names, dtypes and other files of the directory `source`.

    Collective. `path`, on a file system that all ranks share, appears once it is complete.

    Args:
        state: the model.
        source: the model directory that it came from.
        path: the folder to write.
        replaces: whether an existing folder may be replaced.
        with_head: also write tied embeddings under the output head's name, for engines that load an untied head.
        largest_file: bytes of a file at most, unless one tensor is larger.

    Raises:
        RankError: on all ranks, with the errors of any.
    """
    group = state.layout.host_group
    with consensus(group, EXPORTING):
        full = describe_full_tensors(state, source, with_head=with_head)
    gather_parameters(state.chunks)
    with atomic_folder(path, group, what=EXPORTING, replaces=replaces) as folder:
        with consensus(group, EXPORTING):
            if dist.get_rank() == 0:
                copied = sum(full.stored.bytes_of(name) for name in full.untrained)
                copied += sum(full.bytes_of(name) for name in full.copies.values())
                check_free_space(folder, sum(full.bytes_of(name) for name in full.shapes) + copied)
        writer = _Writer(folder, largest_file)
        for parameter in full.parameters:
            with alone(EXPORTING):
                tensors = gather_full_tensors(parameter, full.sizes, _HOST) or {}
            for name, tensor in tensors.items():
                writer.add(name, tensor, full.dtypes[name])
                for copy in (copy_name for copy_name, source in full.copies.items() if source == name):
                    dtype = full.stored.dtypes.get(copy, full.stored.dtypes[name])
                    writer.add_copy(copy, tensor, torch_dtype(dtype))
        if dist.get_rank() == 0:
            for name in full.untrained:
                writer.copy(name, full.stored)
        files = exchange(group, EXPORTING, writer.finish)
        with consensus(group, EXPORTING):
            if dist.get_rank() == 0:
                _finalize(folder, full.origin, [file for of_rank in files for file in of_rank], full.stored)


class _Writer:
    """Writes tensors into files of bounded size.

    The first error is kept until `finish`: other ranks still gather, and would wait for a rank that stops early.
    """

    def __init__(self, folder: Path, largest: int) -> None:
        self.folder, self.largest = folder, largest
        self.files: list[_WrittenFile] = []
        self._pending: dict[str, torch.Tensor] = {}
        self._error: Exception | None = None

    def add(self, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
        """Adds a tensor, cast to the dtype of its file."""
        self._attempt(lambda: self._add(name, tensor, dtype))

    def add_copy(self, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
        """Adds a tensor that has been added under another name: safetensors refuses two in one memory."""
        self._attempt(lambda: self._add(name, tensor.clone(), dtype))

    def _attempt(self, act: Callable[[], None]) -> None:
        """Calls `act` unless an earlier call failed, and keeps its error."""
        if self._error is not None:
            return
        try:
            act()
        except Exception as error:
            self._error = error

    def _add(self, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
        converted = cast_to_file_dtype(name, tensor, dtype)
        pending = sum(tensor.nbytes for tensor in self._pending.values())
        if self._pending and pending + converted.nbytes > self.largest:
            self._flush()
        self._pending[name] = converted

    def copy(self, name: str, stored: StoredTensors) -> None:
        """Adds a tensor of the original directory as it is there."""
        self._attempt(lambda: self._copy(name, stored))

    def _copy(self, name: str, stored: StoredTensors) -> None:
        shape, dtype = stored.shapes[name], torch_dtype(stored.dtypes[name])
        whole = torch.empty(shape, dtype=dtype)
        try:
            for region, values in stored.read(name, slice(0, shape[0])):
                whole[region].copy_(values)
        finally:
            stored.close()
        self._add(name, whole, dtype)

    def finish(self) -> list[_WrittenFile]:
        """The files of this rank. Raises `CheckpointError` if one could not be written."""
        self._attempt(self._flush)
        if self._error is not None:
            raise self._error
        return self.files

    def _flush(self) -> None:
        from safetensors.torch import save_file

        if not self._pending:
            return
        file = self.folder / f"part-{dist.get_rank():05d}-{len(self.files):05d}.safetensors"
        try:
            save_file(self._pending, file, metadata={"format": "pt"})
            with file.open("rb") as written:
                os.fsync(written.fileno())
        except Exception as error:
            raise CheckpointError(f"{file} cannot be written: {describe_cause(error)}") from None
        self.files.append(
            _WrittenFile(name=file.name, tensors={name: tensor.nbytes for name, tensor in self._pending.items()})
        )
        self._pending = {}


def _finalize(folder: Path, origin: Path, files: list[_WrittenFile], stored: StoredTensors) -> None:
    """Names the files as transformers does, writes their index, and copies config and tokenizer files."""
    position = {name: number for number, name in enumerate(stored.shapes)}
    files.sort(key=lambda file: min(position.get(name, len(position)) for name in file.tensors))
    written = {name for file in files for name in file.tensors}
    missing = [name for name in stored.shapes if name not in written and not DERIVED.fullmatch(name)]
    if set(missing) - {HEAD.first_checkpoint_name}:  # a tied head is the embedding
        raise CheckpointError(f"no rank wrote {', '.join(missing)}: export the whole model again")
    # Readers expect one file without an index, or numbered files with one.
    names = (
        [SINGLE]
        if len(files) == 1
        else [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    )
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
