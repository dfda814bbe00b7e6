"""The files of a checkpoint: written so that a rank that fails alone leaves nobody waiting, looked at before reading.

Every error names the file and the cause in one line.
"""

from __future__ import annotations

import contextlib
import json
import queue
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from roll_batching.errors import CheckpointError
from roll_batching.files import cause
from roll_batching.strategy.checkpoint_pickles import foreign_class, only_weights, read_index

_SHOWN, _LONGEST = 3, 160


def check_room(folder: Path, needed: int) -> None:
    """Raises `CheckpointError` when the file system of `folder` says that it has not `needed` bytes left."""
    usage = shutil.disk_usage(folder)
    if usage.total and usage.free < needed:  # some network file systems tell nothing
        raise CheckpointError(
            f"{folder} cannot be written: the checkpoint takes {_size(needed)} and {_size(usage.free)} is free there"
        )


def bytes_of(pieces: Iterator[Any]) -> int:
    """Bytes that this rank writes of the pieces of a sharded state."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica

    return sum(
        piece.data.nbytes
        for piece in pieces
        if isinstance(piece, ShardedTensor) and piece.data is not None and is_main_replica(piece.replica_id)
    )


@contextlib.contextmanager
def errors_at_the_end(folder: Path, needed: int) -> Iterator[None]:
    """Around Megatron's save: what fails while files are written is raised, as `CheckpointError`, when it is through.

    Its save is a row of collectives with files written between them, and a rank that leaves it alone would keep the
    others waiting for ever. Files are written by this process: the processes that Megatron forks for it (0.16) outlive
    a killed rank, and its threads (0.19) forget the cause. `needed` (bytes of the whole checkpoint) is for the message.
    """
    from megatron.core.dist_checkpointing import serialization
    from megatron.core.dist_checkpointing.strategies import common, filesystem_async
    from torch.distributed.checkpoint import CheckpointException

    writer: Any = filesystem_async.FileSystemWriterAsync
    kept: list[tuple[Path, BaseException]] = []

    def write(transforms: Any, use_msc: bool, rank: int, buckets: list[Any], results: Any) -> None:
        results.put({number: _write(writer, transforms, number, bucket, kept) for number, bucket in enumerate(buckets)})

    with contextlib.ExitStack() as patches:
        for owner, name, replacement in (
            (writer, "write_preloaded_data_multiproc", staticmethod(write)),
            (writer, "write_preloaded_data_multithread", staticmethod(write)),
            (writer, "finish", _keeping(getattr(writer, "finish", None), folder / ".metadata", kept)),
            (filesystem_async, "_results_queue", queue.Queue()),
            (serialization, "save_config", _keeping(serialization.save_config, folder / "metadata.json", kept)),
            _common_part(common, folder, kept),
        ):
            if hasattr(owner, name):
                patches.callback(
                    setattr, owner, name, vars(owner)[name] if isinstance(owner, type) else getattr(owner, name)
                )
                setattr(owner, name, replacement)
        try:
            yield
        except CheckpointException as failed:  # no `Exception`; all ranks have it
            own = failed.failures.get(dist.get_rank())
            kept.append((folder, own[0] if own else RuntimeError("another rank could not write")))
    if kept:
        file, error = kept[0]
        free = _size(shutil.disk_usage(folder).free) if folder.is_dir() else "nothing"
        raise CheckpointError(
            f"{file} cannot be written: {_why(file, error)}. The checkpoint takes {_size(needed)}, {free} is free there"
        )


def _write(writer: Any, transforms: Any, number: int, bucket: Any, kept: list[tuple[Path, BaseException]]) -> list[Any]:
    """The results of writing one file; none, and the error kept, when it fails or one before it has."""
    if kept:
        return []
    results: queue.Queue[Any] = queue.Queue()
    count: queue.Queue[Any] = queue.Queue()
    count.put(number)
    writer.write_preloaded_data(
        transforms,
        local_proc_idx=number,
        write_bucket=bucket,
        results_queue=results,
        count_queue=count,
        use_fsync=True,
    )
    _, written = results.get_nowait()
    if isinstance(written, Exception):
        kept.append((Path(bucket[0]), written))
        return []
    return list(written)


def _why(file: Path, error: BaseException) -> str:
    """The cause; where a library has hidden the operating system's, what that says to some more bytes beside `file`."""
    if _system_error(error) is None:
        probe = file.with_name(f"{file.name}.probe")
        try:
            probe.write_bytes(b"\0" * 2**20)
        except OSError as found:
            return cause(found)
        finally:
            with contextlib.suppress(OSError):
                probe.unlink()
    return words(error)


def _keeping(function: Any, file: Path, kept: list[tuple[Path, BaseException]]) -> Callable[..., Any]:
    def act(*arguments: Any, **options: Any) -> Any:
        try:
            return function(*arguments, **options)
        except Exception as error:
            kept.append((file, error))

    return act


def _common_part(common: Any, folder: Path, kept: list[tuple[Path, BaseException]]) -> tuple[Any, str, Any]:
    """Megatron before 0.19 writes what is no tensor into a file of its own."""
    owner = getattr(common, "TorchCommonSaveStrategy", common)
    return owner, "save_common", _keeping(getattr(owner, "save_common", None), folder / "common.pt", kept)


# ---- before and while it is read


def check_files(path: Path) -> None:
    """Raises `CheckpointError`, naming them, when files of the checkpoint `path` are missing, cut off or unreadable."""
    with reading(path / ".metadata"):
        stored = read_index(path / ".metadata").storage_data.values()
    with reading(path / "metadata.json"):
        json.loads((path / "metadata.json").read_text(encoding="utf-8"))
    ends: dict[str, int] = {}
    for part in stored:
        ends[part.relative_path] = max(ends.get(part.relative_path, 0), part.offset + part.length)
    wrong = []
    for name, end in sorted(ends.items()):
        file = path / name
        with reading(file):
            size = file.stat().st_size
        if size < end:
            wrong.append(f"{file} is cut off: it has {size:,} of {end:,} bytes")
    common = path / "common.pt"
    if common.exists() and not zipfile.is_zipfile(common):
        wrong.append(f"{common} is cut off or damaged")
    if wrong:
        more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise CheckpointError("; ".join(wrong[:_SHOWN]) + more)


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
    if (found := _system_error(error)) is not None:
        return cause(found)
    if (name := foreign_class(error)) is not None:
        return f"it names {name}, which no checkpoint holds: unpickling it elsewhere may run code of its writer's"
    lines = str(error).strip().splitlines()
    said = lines[0] if lines else "without a message"
    return f"{type(error).__name__}: {said if len(said) <= _LONGEST else said[:_LONGEST] + '...'}"


def _system_error(error: BaseException | None) -> OSError | None:
    while error is not None:
        if isinstance(error, OSError) and error.errno:
            return error
        error = error.__cause__ or error.__context__
    return None


def _size(count: int) -> str:
    for unit, name in ((10**9, "GB"), (10**6, "MB")):
        if count >= unit:
            return f"{count / unit:,.1f} {name}"
    return f"{count / 1000:,.1f} kB"
