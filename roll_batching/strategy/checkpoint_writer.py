"""Writes checkpoints through Megatron, synchronously or in the background, with errors raised on all ranks.

Megatron's save is a sequence of collectives with file writes between them: all ranks agree on who writes what, each
writes its files, one writes the index. Only the writes can go on while training continues. A rank that fails in them
must still take part in the collectives that follow, or the others would hang.
"""

from __future__ import annotations

import contextlib
import inspect
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from roll_batching.distributed import consensus, exchange
from roll_batching.errors import CheckpointError
from roll_batching.files import cause
from roll_batching.megatron_patches.checkpoint_files import file_writes_replaced, write_bucket
from roll_batching.strategy.checkpoint_files import alone, describe_cause, hide_future_warnings, system_error
from roll_batching.strategy.checkpoint_folder import (
    MANIFEST,
    RECORD,
    SAVING,
    FileDigest,
    digest_files,
    listed_files,
    manifest_text,
    write_text,
)


class CheckpointWriter:
    """Writes the tensors of a checkpoint into a folder.

    Construction and `finish` are collective over `group`. `finish` returns when all files are complete.

    Args:
        tensors: the sharded state, whose shards make whole tensors.
        record: the content of `strategy.json`, which is written last.
        folder: an empty folder, usually of an `AtomicFolder`.
        group: the ranks that write.
        size: bytes of the whole checkpoint, for errors.
        background: write from a copy in host memory, in a thread, while the caller continues.
        manifest: write sizes and digests of all files, which are compared before loading.

    Raises:
        RankError: on all ranks, with file and cause, when a file could not be written.
        CollectiveError: on this rank, for another failure inside Megatron's collectives.
    """

    def __init__(
        self,
        tensors: dict[str, Any],
        record: str,
        folder: Path,
        group: Any,
        *,
        size: int,
        background: bool,
        manifest: bool = True,
    ) -> None:
        from megatron.core import dist_checkpointing

        self._group, self._record = group, record
        self._folder = folder
        self._digests: dict[str, FileDigest] | None = {} if manifest else None
        """Digests of the files that this rank has written; None without a manifest."""
        self._errors = _WriteErrors(folder, size, self._digests)
        self._thread: threading.Thread | None = None
        self._finalizers: list[Callable[[], None]] = []
        if not background:
            with self._errors.collected(), hide_future_warnings():
                dist_checkpointing.save(tensors, str(folder), validate_access_integrity=False)
            return
        # 0.19 deprecates its own asynchronous strategy, and its other one needs the package nvidia-resiliency-ext.
        has_strategies = "async_strategy" in inspect.signature(dist_checkpointing.save).parameters
        options: dict[str, Any] = {"async_strategy": "mcore"} if has_strategies else {}
        request: Any = None
        with self._errors.collected(), hide_future_warnings():
            request = dist_checkpointing.save(
                tensors, str(folder), validate_access_integrity=False, async_sharded_save=True, **options
            )
        with consensus(group, SAVING):
            self._errors.raise_first()
            self._finalizers = request.finalize_fns
            if request.async_fn is not None:  # this rank has files to write
                rank, _, results = request.async_fn_args
                arguments = (rank, _copy_to_host(request), results)
                self._thread = threading.Thread(target=request.async_fn, args=arguments, daemon=True)
                self._thread.start()

    @property
    def done(self) -> bool:
        """Whether this rank has written its files, or failed to."""
        return self._thread is None or not self._thread.is_alive()

    def add_to_manifest(self, name: str) -> None:
        """Lists a file in the manifest that this rank has written itself."""
        if self._digests is not None:
            self._digests |= digest_files(self._folder, [name])

    def finish(self) -> None:
        """Waits for this rank's files and completes the checkpoint."""
        if self._thread is not None:
            self._thread.join()
        with self._errors.collected(), hide_future_warnings():
            for finalize in self._finalizers:
                finalize()
        digests_by_rank = exchange(self._group, SAVING, self._local_digests)
        with consensus(self._group, SAVING):
            if dist.get_rank() == 0:
                write_text(self._folder / RECORD, self._record)
                if self._digests is not None:
                    digests = {name: digest for of_rank in digests_by_rank for name, digest in of_rank.items()}
                    rest = [name for name in listed_files(self._folder) if name not in digests]
                    write_text(self._folder / MANIFEST, manifest_text(digests | digest_files(self._folder, rest)))

    def _local_digests(self) -> dict[str, FileDigest]:
        """Raises `CheckpointError` if a write on this rank has failed."""
        self._errors.raise_first()
        return self._digests or {}


def _copy_to_host(request: Any) -> list[Any]:
    """Megatron's buckets, of one file each, with copies of the tensors in host memory.

    Megatron copies from the device, but uses tensors on the CPU as they are: training would change them meanwhile.
    """
    buckets = []
    for (name, key, (objects, tensors)), (*_, (_, originals)) in zip(
        request.preload_fn(), request.async_fn_args[1], strict=True
    ):
        copies = [
            (item, tensor.clone() if original.is_cpu else tensor)
            for (item, tensor), (_, original) in zip(tensors, originals, strict=True)
        ]
        buckets.append((name, key, (objects, copies)))
    return buckets


class _WriteErrors:
    """Errors of Megatron's file writes on this rank, kept until the collectives that follow them are through."""

    def __init__(self, folder: Path, size: int, digests: dict[str, FileDigest] | None) -> None:
        self._folder, self._size, self._digests = folder, size, digests
        self._errors: list[tuple[Path, BaseException]] = []

    @contextlib.contextmanager
    def collected(self) -> Iterator[None]:
        """Context around a part of Megatron's save that replaces its writer functions."""
        from torch.distributed.checkpoint import CheckpointException

        folder, errors, digests = self._folder, self._errors, self._digests

        def write(transforms: Any, buckets: list[Any], results: Any) -> None:
            results.put({number: _write(transforms, number, bucket, errors) for number, bucket in enumerate(buckets)})
            if digests is not None and not errors:  # on this thread, so that digests too are computed in the background
                try:
                    digests.update(digest_files(folder, [Path(bucket[0]).name for bucket in buckets]))
                except Exception as error:  # what leaves the thread is lost
                    errors.append((folder, error))

        with file_writes_replaced(write, lambda function, name: _collecting(function, folder / name, errors)):
            try:
                with alone(f"writing {folder}"):
                    yield
            except CheckpointException as failed:  # not an `Exception`; raised on all ranks
                failure = failed.failures.get(dist.get_rank())
                errors.append((folder, failure[0] if failure else RuntimeError("another rank could not write")))

    def raise_first(self) -> None:
        """Raises `CheckpointError` with file and cause of the first error on this rank, if there is one."""
        if not self._errors:
            return
        file, error = self._errors[0]
        free = _size(shutil.disk_usage(self._folder).free) if self._folder.is_dir() else "nothing"
        raise CheckpointError(
            f"{file} cannot be written: {_cause_of_write_error(file, error)}. The checkpoint takes "
            f"{_size(self._size)}, {free} is free there"
        )


def _write(transforms: Any, number: int, bucket: Any, errors: list[tuple[Path, BaseException]]) -> list[Any]:
    """Megatron's write results of one file; empty, with the error recorded, if this or an earlier write failed."""
    if errors:
        return []
    try:
        written = write_bucket(transforms, number, bucket)
    except Exception as error:  # the results of the other files must reach Megatron, and the error all ranks
        written = error
    if isinstance(written, Exception):
        errors.append((Path(bucket[0]), written))
        return []
    return written


def _cause_of_write_error(file: Path, error: BaseException) -> str:
    """The cause of a failed write; a test write beside `file` finds a system error that a library has hidden."""
    if system_error(error) is None:
        probe = file.with_name(f"{file.name}.probe")
        try:
            probe.write_bytes(b"\0" * 2**20)
        except OSError as probe_error:
            return cause(probe_error)
        finally:
            with contextlib.suppress(OSError):
                probe.unlink()
    return describe_cause(error)


def _collecting(function: Any, file: Path, errors: list[tuple[Path, BaseException]]) -> Callable[..., Any]:
    """`function`, with its errors recorded instead of raised."""

    def call(*arguments: Any, **options: Any) -> Any:
        try:
            return function(*arguments, **options)
        except Exception as error:
            errors.append((file, error))

    return call


def check_free_space(folder: Path, needed: int) -> None:
    """Raises `CheckpointError` if the file system of `folder` has less than `needed` bytes free."""
    usage = shutil.disk_usage(folder)
    if usage.total and usage.free < needed:  # some network file systems report 0
        raise CheckpointError(
            f"{folder} cannot be written: the checkpoint takes {_size(needed)} and {_size(usage.free)} is free there"
        )


def bytes_of(shards: Iterable[Any]) -> int:
    """Bytes of a sharded state that this rank writes."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica

    return sum(
        shard.data.nbytes
        for shard in shards
        if isinstance(shard, ShardedTensor) and shard.data is not None and is_main_replica(shard.replica_id)
    )


def _size(count: int) -> str:
    for unit, name in ((10**9, "GB"), (10**6, "MB")):
        if count >= unit:
            return f"{count / unit:,.1f} {name}"
    return f"{count / 1000:,.1f} kB"
