"""Megatron writes a checkpoint: a rank that fails alone leaves nobody waiting; on request, training goes on meanwhile.

Its save is a row of collectives with files written between them: first all ranks agree on who writes what, then each
writes its files, then one writes the index of all. The middle one alone can go on while the model is trained further.
"""

from __future__ import annotations

import contextlib
import inspect
import queue
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from roll_batching.distributed import consensus, exchange
from roll_batching.errors import CheckpointError
from roll_batching.files import cause
from roll_batching.strategy.checkpoint_files import quiet, system_error, words
from roll_batching.strategy.checkpoint_folder import RECORD, SAVING, write_text
from roll_batching.strategy.checkpoint_manifest import MANIFEST, FileDigest, digest_files, manifest_text, names_here


class Writing:
    """The tensors of a checkpoint on their way into the folder of a draft.

    All ranks of `group` make it and call `finish`, which returns when all files are whole, and raises `RankError` on
    all ranks, with file and cause, when one is not.

    Args:
        tensors: the sharded state.
        record: the text of `strategy.json`, which is written last.
        folder: of the draft.
        group: the ranks that must agree.
        size: bytes of the whole checkpoint, for errors.
        manifest: whether sizes and digests of all files are kept, to be compared before they are loaded.
        aside: write while the caller goes on. What is written is as it was when this returned: a copy in host memory.
    """

    def __init__(
        self,
        tensors: dict[str, Any],
        record: str,
        folder: Path,
        group: Any,
        *,
        size: int,
        aside: bool,
        manifest: bool = True,
    ) -> None:
        from megatron.core import dist_checkpointing

        self._group, self._record = group, record
        self._folder = folder
        self._own: dict[str, FileDigest] | None = {} if manifest else None
        """Of the files that this rank has written."""
        self._errors = _FileErrors(folder, size, self._own)
        self._thread: threading.Thread | None = None
        self._last: list[Callable[[], None]] = []
        if not aside:
            with self._errors.kept(), quiet():
                dist_checkpointing.save(tensors, str(folder))
            return
        # Megatron 0.19's own is announced to go, and its other one needs a package of its own, nvidia-resiliency-ext
        own = "async_strategy" in inspect.signature(dist_checkpointing.save).parameters
        options = {"async_strategy": "mcore"} if own else {}
        request: Any = None
        with self._errors.kept(), quiet():
            request = dist_checkpointing.save(tensors, str(folder), async_sharded_save=True, **options)
        with consensus(group, SAVING):
            self._errors.raise_first()
            self._last = request.finalize_fns
            if request.async_fn is not None:  # this rank has something to write
                rank, _, results = request.async_fn_args
                arguments = (rank, _copied(request), results)
                self._thread = threading.Thread(target=request.async_fn, args=arguments, daemon=True)
                self._thread.start()

    @property
    def done(self) -> bool:
        """Whether this rank has written its files, or failed to."""
        return self._thread is None or not self._thread.is_alive()

    def add(self, name: str) -> None:
        """The manifest lists the file `name` too, which this rank has written."""
        if self._own is not None:
            self._own |= digest_files(self._folder, [name])

    def finish(self) -> None:
        """Waits for this rank's files, and makes the checkpoint whole."""
        if self._thread is not None:
            self._thread.join()
        with self._errors.kept(), quiet():
            for act in self._last:
                act()
        everyone = exchange(self._group, SAVING, self._written)
        with consensus(self._group, SAVING):
            if dist.get_rank() == 0:
                write_text(self._folder / RECORD, self._record)
                if self._own is not None:
                    listed = {name: one for own in everyone for name, one in own.items()}
                    rest = [name for name in names_here(self._folder) if name not in listed]
                    write_text(self._folder / MANIFEST, manifest_text(listed | digest_files(self._folder, rest)))

    def _written(self) -> dict[str, FileDigest]:
        """Raises `CheckpointError` when something has failed on this rank."""
        self._errors.raise_first()
        return self._own or {}


def _copied(request: Any) -> list[Any]:
    """Megatron's buckets of one file each, with tensors in host memory that nobody changes."""
    found = []
    for (name, key, (objects, tensors)), (*_, (_, before)) in zip(
        request.preload_fn(), request.async_fn_args[1], strict=True
    ):
        copies = [
            (item, tensor.clone() if original.is_cpu else tensor)
            for (item, tensor), (_, original) in zip(tensors, before, strict=True)
        ]
        found.append((name, key, (objects, copies)))
    return found


class _FileErrors:
    """What fails while Megatron writes files: kept until it is through, as the other ranks wait in its collectives."""

    def __init__(self, folder: Path, size: int, digests: dict[str, FileDigest] | None) -> None:
        self._folder, self._size, self._digests = folder, size, digests
        self._found: list[tuple[Path, BaseException]] = []

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Around a part of Megatron's save.

        Files are written by this process: the processes that Megatron forks for it (0.16) outlive a killed rank, and
        its threads (0.19) forget the cause.
        """
        from megatron.core.dist_checkpointing import serialization
        from megatron.core.dist_checkpointing.strategies import common, filesystem_async
        from torch.distributed.checkpoint import CheckpointException

        writer: Any = filesystem_async.FileSystemWriterAsync
        folder, found, digests = self._folder, self._found, self._digests

        def write(transforms: Any, use_msc: bool, rank: int, buckets: list[Any], results: Any) -> None:
            written = {
                number: _write(writer, transforms, number, bucket, found) for number, bucket in enumerate(buckets)
            }
            results.put(written)
            if digests is not None and not found:  # here, on the thread that writes while training goes on
                try:
                    digests.update(digest_files(folder, [Path(bucket[0]).name for bucket in buckets]))
                except CheckpointError as error:
                    found.append((folder, error))

        with contextlib.ExitStack() as patches:
            for owner, name, replacement in (
                (writer, "write_preloaded_data_multiproc", staticmethod(write)),
                (writer, "write_preloaded_data_multithread", staticmethod(write)),
                (writer, "finish", _keeping(getattr(writer, "finish", None), folder / ".metadata", found)),
                (filesystem_async, "_results_queue", queue.Queue()),
                (serialization, "save_config", _keeping(serialization.save_config, folder / "metadata.json", found)),
                _common_part(common, folder, found),
            ):
                if hasattr(owner, name):
                    before = vars(owner)[name] if isinstance(owner, type) else getattr(owner, name)
                    patches.callback(setattr, owner, name, before)
                    setattr(owner, name, replacement)
            try:
                yield
            except CheckpointException as failed:  # no `Exception`; all ranks have it
                own = failed.failures.get(dist.get_rank())
                found.append((folder, own[0] if own else RuntimeError("another rank could not write")))

    def raise_first(self) -> None:
        """Raises `CheckpointError` with file and cause when something has failed on this rank."""
        if not self._found:
            return
        file, error = self._found[0]
        free = _size(shutil.disk_usage(self._folder).free) if self._folder.is_dir() else "nothing"
        raise CheckpointError(
            f"{file} cannot be written: {_why(file, error)}. The checkpoint takes {_size(self._size)}, "
            f"{free} is free there"
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
    if system_error(error) is None:
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


def _size(count: int) -> str:
    for unit, name in ((10**9, "GB"), (10**6, "MB")):
        if count >= unit:
            return f"{count / unit:,.1f} {name}"
    return f"{count / 1000:,.1f} kB"
