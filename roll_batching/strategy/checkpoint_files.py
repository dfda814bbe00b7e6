"""The files of a checkpoint: looked at before they are read, and whatever fails said in a line.

Every error names the file and the cause in one line.
"""

from __future__ import annotations

import contextlib
import json
import stat
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from roll_batching.errors import CheckpointError
from roll_batching.files import cause
from roll_batching.strategy.checkpoint_pickles import foreign_class, only_weights, read_index

_SHOWN, _LONGEST = 3, 160


def check_files(path: Path) -> None:
    """Raises `CheckpointError`, naming them, when files of the checkpoint `path` are missing, cut off or unreadable."""
    with reading(path / ".metadata"):
        check_regular(path / ".metadata")
        stored = read_index(path / ".metadata").storage_data.values()
    with reading(path / "metadata.json"):
        check_regular(path / "metadata.json")
        json.loads((path / "metadata.json").read_text(encoding="utf-8"))
    ends: dict[str, int] = {}
    for part in stored:
        ends[part.relative_path] = max(ends.get(part.relative_path, 0), part.offset + part.length)
    wrong = []
    for name, end in sorted(ends.items()):
        file = path / name
        if Path(name).name != name:
            raise CheckpointError(f"{path / '.metadata'} names the file {name!r}, which is not in its folder")
        with reading(file):
            size = check_regular(file)
        if size < end:
            wrong.append(f"{file} is cut off: it has {size:,} of {end:,} bytes")
    common = path / "common.pt"
    if common.exists() and not zipfile.is_zipfile(common):
        wrong.append(f"{common} is cut off or damaged")
    if wrong:
        more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise CheckpointError("; ".join(wrong[:_SHOWN]) + more)


def check_regular(file: Path) -> int:
    """Bytes of a regular file; raises `CheckpointError` for any other: a pipe would be waited for."""
    found = file.stat()
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{file} cannot be read: it is no regular file")
    return found.st_size


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Whatever fails inside becomes a `CheckpointError` of one line that names `path`."""
    try:
        yield
    except CheckpointError:
        raise
    except FileNotFoundError as error:
        raise CheckpointError(f"{error.filename or path} is missing") from None
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {words(error)}") from None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Megatron still calls what torch has announced to rename: nothing that a user could change."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def load_tensors(state: dict[str, Any], path: Path) -> tuple[dict[str, Any], CheckpointError | None]:
    """Megatron's load: what it read, or this rank's error. All ranks call it, and fail together.

    torch tells each rank of every rank's error, with all tracebacks, in an exception that is no `Exception`.
    """
    from megatron.core import dist_checkpointing
    from torch.distributed.checkpoint import CheckpointException

    try:
        with reading(path), only_weights():
            return dist_checkpointing.load(state, str(path)), None
    except CheckpointException as failed:
        own = failed.failures.get(dist.get_rank())
        said = words(own[0]) if own else f"rank {', '.join(map(str, failed.failures))} could not read it"
        return {}, CheckpointError(f"{path} cannot be read: {said}")
    except CheckpointError as error:
        return {}, error


def words(error: BaseException) -> str:
    """The cause in one line: the operating system's, where there is one below what a library made of it."""
    if (found := system_error(error)) is not None:
        return cause(found)
    if (name := foreign_class(error)) is not None:
        return f"it names {name}, which no checkpoint holds: unpickling it elsewhere may run code of its writer's"
    lines = str(error).strip().splitlines()
    said = lines[0] if lines else "without a message"
    return f"{type(error).__name__}: {said if len(said) <= _LONGEST else said[:_LONGEST] + '...'}"


def system_error(error: BaseException | None) -> OSError | None:
    """The operating system's error in `error` or below it; None where there is none."""
    while error is not None:
        if isinstance(error, OSError) and error.errno:
            return error
        error = error.__cause__ or error.__context__
    return None
