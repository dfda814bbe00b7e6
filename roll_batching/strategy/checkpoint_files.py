"""Reading the files of a checkpoint: checks before they are read, and one-line errors with file and cause.

Unpickling calls whatever a file names. The index of `torch.distributed.checkpoint` (`.metadata`) is a pickle, and torch
unpickles it without restrictions; so it does with small objects in the data files (`weights_only=False`). Here only
known names are called.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import stat
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from roll_batching.errors import CheckpointError, CollectiveError, RankError, first_of
from roll_batching.files import cause

_SHOWN, _LONGEST = 3, 160  # problems that an error lists, and characters of a cause


def check_files(path: Path) -> None:
    """Raises `CheckpointError`, naming them, when files of the checkpoint `path` are missing, cut off or unreadable."""
    with explain_read_errors(path / ".metadata"):
        check_regular(path / ".metadata")
        stored = read_index(path / ".metadata").storage_data.values()
    with explain_read_errors(path / "metadata.json"):
        check_regular(path / "metadata.json")
        json.loads((path / "metadata.json").read_text(encoding="utf-8"))
    # A file holds several tensors: it must reach to the end of the last one that the index lists.
    ends: dict[str, int] = {}
    for part in stored:
        ends[part.relative_path] = max(ends.get(part.relative_path, 0), part.offset + part.length)
    problems = []
    for name, end in sorted(ends.items()):
        file = path / name
        if Path(name).name != name:
            raise CheckpointError(
                f"{path / '.metadata'} names the file {name!r}, which is not in its folder: load another checkpoint"
            )
        with explain_read_errors(file):
            size = check_regular(file)
        if size < end:
            problems.append(f"{file} is cut off: it has {size:,} of {end:,} bytes")
    common = path / "common.pt"
    if common.exists() and not zipfile.is_zipfile(common):
        problems.append(f"{common} is cut off or damaged")
    if problems:
        raise CheckpointError(f"{first_of(problems, _SHOWN)}: copy the checkpoint again, or load another one")


def check_regular(file: Path) -> int:
    """Bytes of a regular file. Raises `CheckpointError` for other kinds: opening a named pipe would hang."""
    status = file.stat()
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{file} cannot be read: it is no regular file. Put a copy of the file there")
    return status.st_size


@contextlib.contextmanager
def explain_read_errors(path: Path) -> Iterator[None]:
    """Context that turns every error into a one-line `CheckpointError` with `path`."""
    try:
        yield
    except CheckpointError:
        raise
    except FileNotFoundError as error:
        raise CheckpointError(f"{error.filename or path} is missing: copy the checkpoint again") from None
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {describe_cause(error)}") from None


@contextlib.contextmanager
def hide_future_warnings() -> Iterator[None]:
    """Context without FutureWarnings: Megatron calls deprecated functions of torch, which users cannot change."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def load_tensors(state: dict[str, Any], path: Path) -> tuple[dict[str, Any], CheckpointError | None]:
    """Megatron's load: (loaded state, None), or ({}, this rank's error). Collective; all ranks fail together.

    torch raises the errors of all ranks, with all tracebacks, as a `CheckpointException`, which is not an `Exception`.
    Any other error is a `CollectiveError`.

    Args:
        state: shards that make whole tensors; the check is left out here, because it raises on one rank.
        path: the checkpoint, whose common part can be read.
    """
    from megatron.core import dist_checkpointing
    from torch.distributed.checkpoint import CheckpointException

    try:
        with alone(f"loading {path}"), only_weights():
            return dist_checkpointing.load(state, str(path), validate_access_integrity=False), None
    except CheckpointException as failed:
        failure = failed.failures.get(dist.get_rank())
        reason = (
            describe_cause(failure[0]) if failure else f"rank {', '.join(map(str, failed.failures))} could not read it"
        )
        return {}, CheckpointError(f"{path} cannot be read: {reason}")


def read_common(path: Path) -> None:
    """Raises `CheckpointError` where the part of `path` that every rank reads by itself cannot be read.

    Megatron reads it between its collectives, where an error on one rank leaves the others waiting.
    """
    from megatron.core.dist_checkpointing import load_common_state_dict
    from torch.distributed.checkpoint import CheckpointException

    with explain_read_errors(path), only_weights(), hide_future_warnings():
        try:
            load_common_state_dict(str(path))
        except CheckpointException as failed:
            raise failed.failures[dist.get_rank()][0] from None


@contextlib.contextmanager
def alone(what: str) -> Iterator[None]:
    """Context around collectives of a library, with code between them that can fail on one rank.

    The other ranks wait inside, and nothing that this rank does can reach them there: the error must end its process,
    which ends theirs. So it is a `CollectiveError`, which no consensus waits for.
    """
    try:
        yield
    except (RankError, CollectiveError):
        raise
    except Exception as error:
        raise CollectiveError(
            f"{what} failed on rank {dist.get_rank()}, and the other ranks cannot be told: {describe_cause(error)}"
        ) from error


def describe_cause(error: BaseException) -> str:
    """The cause of `error` in one line: the operating system's error behind a library's, if there is one."""
    if (os_error := system_error(error)) is not None:
        return cause(os_error)
    if (name := foreign_class(error)) is not None:
        return f"it names {name}, which no checkpoint holds: unpickling it elsewhere may run its author's code"
    lines = str(error).strip().splitlines()
    message = lines[0] if lines else "without a message"
    return f"{type(error).__name__}: {message if len(message) <= _LONGEST else message[:_LONGEST] + '...'}"


def system_error(error: BaseException | None) -> OSError | None:
    """The first OSError in the chain of causes of `error`, itself included; None without one."""
    while error is not None:
        if isinstance(error, OSError) and error.errno:
            return error
        error = error.__cause__ or error.__context__
    return None


# ---- unpickling


_DCP = "torch.distributed.checkpoint"
_INDEX_CLASSES = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # Python 3.13
    (f"{_DCP}.filesystem", "_StorageInfo"),
    *((f"{_DCP}.planner", name) for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")),
    *(
        (f"{_DCP}.metadata", name)
        for name in (
            "Metadata",
            "MetadataIndex",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
}
"""Classes of an index, in addition to torch's dtypes. They are plain data: constructing them runs no other code."""
_FORCED, _FORCED_OFF = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"


class _IndexReader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) not in _INDEX_CLASSES:
            raise pickle.UnpicklingError(
                f"Unsupported GLOBAL {module}.{name}"
            )  # the words of torch's own error, which `foreign_class` reads
        return super().find_class(module, name)


def read_index(file: Path) -> Any:
    """Torch's `Metadata` in the file `.metadata`. Raises `UnpicklingError` for any other class."""
    with file.open("rb") as stream:
        return _IndexReader(stream).load()


@contextlib.contextmanager
def only_weights() -> Iterator[None]:
    """Context in which every `torch.load` has `weights_only=True`, whatever its argument.

    torch then refuses classes outside its own and Megatron's lists of safe globals; see `foreign_class`.
    """
    before = {name: os.environ.pop(name, None) for name in (_FORCED, _FORCED_OFF)}
    os.environ[_FORCED] = "1"
    try:
        yield
    finally:
        del os.environ[_FORCED]
        os.environ.update({name: value for name, value in before.items() if value is not None})


def foreign_class(error: BaseException | None) -> str | None:
    """The class that `error`, or one of its causes, refused to unpickle; None for other errors."""
    while error is not None:
        if match := re.search(r"GLOBAL ([\w.]+)", str(error)):
            return match[1]
        error = error.__cause__ or error.__context__
    return None
