"""Replaces the functions with which Megatron writes the files of a checkpoint. For Megatron 0.16 to 0.19.

Files are written by the calling process: the processes that Megatron forks for them (0.16) outlive a killed rank, and
its threads (0.19) lose the cause of an error. An error is collected instead of raised, because Megatron's collectives
follow in which the other ranks wait.
"""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def file_writes_replaced(
    write: Callable[[Any, list[Any], Any], None], collecting: Callable[[Any, str], Callable[..., Any]]
) -> Iterator[None]:
    """Context around a part of Megatron's save in which `write` writes the files.

    Args:
        write: called with Megatron's transforms, its buckets of one file each, and the queue for their results.
        collecting: wraps a function of Megatron that writes the named file, so that it does not raise.
    """
    from megatron.core.dist_checkpointing import serialization
    from megatron.core.dist_checkpointing.strategies import common, filesystem_async

    writer: Any = filesystem_async.FileSystemWriterAsync
    # Megatron before 0.19 writes objects that are not tensors into a separate file.
    common_owner: Any = getattr(common, "TorchCommonSaveStrategy", common)

    def write_all(transforms: Any, use_msc: bool, rank: int, buckets: list[Any], results: Any) -> None:
        write(transforms, buckets, results)

    with contextlib.ExitStack() as patches:
        for owner, name, replacement in (
            (writer, "write_preloaded_data_multiproc", staticmethod(write_all)),
            (writer, "write_preloaded_data_multithread", staticmethod(write_all)),
            (writer, "finish", collecting(getattr(writer, "finish", None), ".metadata")),
            (filesystem_async, "_results_queue", queue.Queue()),
            (serialization, "save_config", collecting(serialization.save_config, "metadata.json")),
            (common_owner, "save_common", collecting(getattr(common_owner, "save_common", None), "common.pt")),
        ):
            if hasattr(owner, name):
                before = vars(owner)[name] if isinstance(owner, type) else getattr(owner, name)
                patches.callback(setattr, owner, name, before)
                setattr(owner, name, replacement)
        yield


def write_bucket(transforms: Any, number: int, bucket: Any) -> list[Any] | Exception:
    """Writes one file with Megatron's writer, in this process. Returns its results, or the error that it caught."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    results: queue.Queue[Any] = queue.Queue()
    count: queue.Queue[Any] = queue.Queue()
    count.put(number)
    FileSystemWriterAsync.write_preloaded_data(
        transforms,
        local_proc_idx=number,
        write_bucket=bucket,
        results_queue=results,
        count_queue=count,
        use_fsync=True,
    )
    _, written = results.get_nowait()
    return written if isinstance(written, Exception) else list(written)
