"""A model written as a directory of Hugging Face's: the tensors that the one it came from has, and its other files.

Tensor-parallel shards meet on the first rank of their group, which writes what it has of the model: every stage and
every expert's rank writes its own files, and no rank ever holds more than one of them.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from roll_batching.distributed import consensus, exchange
from roll_batching.errors import CheckpointError
from roll_batching.files import cause
from roll_batching.huggingface.directory import INDEX, SINGLE, directory_of, files_beside_weights
from roll_batching.huggingface.families import HEAD, rules_of
from roll_batching.huggingface.stored import DERIVED, StoredTensors, torch_dtype
from roll_batching.huggingface.tensors import Sizes, expected_tensors, pieces
from roll_batching.modeling.pretrained import PlacedParameter, family_of, placed_parameters
from roll_batching.strategy.checkpoint_files import words
from roll_batching.strategy.checkpoint_folder import whole_or_nothing, write_text
from roll_batching.strategy.checkpoint_writer import check_room
from roll_batching.strategy.state import ModelState
from roll_batching.strategy.weights import gather_parameters

EXPORTING = "writing the model"
_LARGEST_FILE = 4 * 10**9
"""Bytes; a file holds one tensor at least."""


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
    architecture, group = state.architecture, state.layout.host_group
    with consensus(group, EXPORTING):
        if architecture is None:
            raise CheckpointError("a model that was built outside (from_parts) has no model directory to be written as")
        origin = directory_of(source)
        family = family_of(origin)
        parameters = list(placed_parameters(state.chunks, family, architecture))
        stored = StoredTensors(origin)
        sizes = Sizes.of(architecture)
        expected = expected_tensors(rules_of(family, architecture), sizes)
        problems = stored.misfits(expected, [HEAD.theirs[0][0]])
        if problems:
            raise CheckpointError(f"{origin} is not the directory that this model came from: {'; '.join(problems)}")
        dtypes = {name: torch_dtype(stored.dtypes[name]) for name in expected}
    gather_parameters(state.chunks)
    with whole_or_nothing(path, group, what=EXPORTING, replaces=replaces) as folder:
        with consensus(group, EXPORTING):
            if dist.get_rank() == 0:
                check_room(
                    folder, sum(torch.Size(shape).numel() * dtypes[name].itemsize for name, shape in expected.items())
                )
        writer = _Writer(folder, largest_file)
        for name, tensor in _whole_tensors(parameters, sizes, tied=architecture.tie_word_embeddings):
            writer.add(name, tensor, dtypes[name])
        files = exchange(group, EXPORTING, writer.finish)
        with consensus(group, EXPORTING):
            if dist.get_rank() == 0:
                _conclude(folder, origin, [file for one in files for file in one], stored)


@torch.no_grad()
def _whole_tensors(
    parameters: list[PlacedParameter], sizes: Sizes, *, tied: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """The checkpoint's tensors that this rank writes, whole, on the host. Collective among tensor-parallel ranks."""
    for placed in parameters:
        if not placed.is_first_replica or (tied and placed.rule.ours == HEAD.ours):
            continue
        shards = _gathered(placed)
        if shards is None:
            continue
        found: dict[str, torch.Tensor] = {}
        for rank, shard in enumerate(shards):
            for piece in pieces(placed.rule, sizes, rank, placed.ranks):
                if piece.name not in found:
                    shape = next(sizes.shape(shape) for name, shape in placed.rule.theirs if name == piece.name)
                    found[piece.name] = torch.empty(shape, dtype=shard.dtype)
                whole = found[piece.name]
                target = whole[piece.rows] if piece.columns is None else whole[piece.rows, piece.columns]
                target.copy_(shard[piece.at])
        yield from found.items()


def _gathered(placed: PlacedParameter) -> list[torch.Tensor] | None:
    """The shards of a parameter on the host, on the first rank that has one; None on the others."""
    mine = placed.parameter.detach().contiguous()
    if placed.ranks == 1 or placed.rule.join == "copy":
        return [mine.cpu()] * placed.ranks if placed.rank == 0 else None
    first = dist.get_global_rank(placed.group, 0)
    raw = mine.view(torch.uint8)  # of any precision, whatever the group's backend knows
    parts = [torch.empty_like(raw) for _ in range(placed.ranks)] if placed.rank == 0 else None
    dist.gather(raw, parts, dst=first, group=placed.group)
    return None if parts is None else [part.view(mine.dtype).cpu() for part in parts]


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
        converted = tensor.to(dtype)
        if dtype is torch.float16 and not bool(converted.isfinite().all()) and bool(tensor.isfinite().all()):
            text = f"{name} has values beyond fp16, the precision of the files that the model came from"
            self._error = CheckpointError(f"{text}: set their dtype to bfloat16 (config.json) and convert them")
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
