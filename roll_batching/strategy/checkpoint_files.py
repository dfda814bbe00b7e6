"""Reading the files of a checkpoint: checks before they are read, and one-line errors with file and cause."""

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

from roll_batching.errors import CheckpointError, CollectiveError, RankError
from roll_batching.files import cause
from roll_batching.strategy.checkpoint_pickles import foreign_class, only_weights, read_index

_SHOWN, _LONGEST = 3, 160


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
            raise CheckpointError(f"{path / '.metadata'} names the file {name!r}, which is not in its folder")
        with explain_read_errors(file):
            size = check_regular(file)
        if size < end:
            problems.append(f"{file} is cut off: it has {size:,} of {end:,} bytes")
    common = path / "common.pt"
    if common.exists() and not zipfile.is_zipfile(common):
        problems.append(f"{common} is cut off or damaged")
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise CheckpointError("; ".join(problems[:_SHOWN]) + more)


def check_regular(file: Path) -> int:
    """Bytes of a regular file. Raises `CheckpointError` for other kinds: opening a named pipe would hang."""
    status = file.stat()
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{file} cannot be read: it is no regular file")
    return status.st_size


@contextlib.contextmanager
def explain_read_errors(path: Path) -> Iterator[None]:
    """Context that turns every error into a one-line `CheckpointError` with `path`."""
    try:
        yield
    except CheckpointError:
        raise
    except FileNotFoundError as error:
        raise CheckpointError(f"{error.filename or path} is missing") from None
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
        own = failed.failures.get(dist.get_rank())
        reason = describe_cause(own[0]) if own else f"rank {', '.join(map(str, failed.failures))} could not read it"
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
