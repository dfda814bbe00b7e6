"""A process group of torch's with the ranks of one server, beside that of the job's processes.

Servers make their side with what torch builds `init_process_group` from, under a name that we tell them; they look for
each other in a store below that name (`PREFIXES`). `new_group` takes ranks of the job alone, so that our side is made
of the backend itself.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import datetime
import os
import socket
import threading
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

PREFIXES = {"gloo": ("{group}", "{group}/", "cpu/"), "nccl": ("{group}", "{group}/", "cuda/")}
"""Of the keys by which ranks find each other, the outermost first: one of SGLang's `init_custom_process_group`, two
of torch's `_new_process_group_helper` (`torch/distributed/distributed_c10d.py`, 2.13)."""


def backend_for(device: torch.device) -> str:
    """What tensors on `device` travel by."""
    return "nccl" if device.type == "cuda" else "gloo"


def new_store() -> dist.TCPStore:
    """Where this process and servers meet: on a free port of this machine, for as long as the object lives."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def address_towards(url: str, seconds: float) -> str:
    """This machine's address, as the server at `url` sees it. Raises OSError where nobody listens there."""
    parts = urllib.parse.urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    with socket.create_connection((parts.hostname or "", port), timeout=seconds) as connection:
        address: str = connection.getsockname()[0]
        return address


class WeightGroup:
    """The group `name` of this process, its rank 0, and `size` - 1 others, who meet at the store on `port`.

    Making it returns when all are there. What takes longer than `seconds` raises RuntimeError, as where a rank dies.
    """

    def __init__(self, port: int, name: str, size: int, device: torch.device, seconds: float) -> None:
        self.name, self.device = name, device
        timeout, backend = datetime.timedelta(seconds=seconds), backend_for(device)
        # A connection of its own: one at a time uses it, also while it waits for a server that does not come.
        below: Any = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timeout)
        for prefix in PREFIXES[backend]:
            below = dist.PrefixStore(prefix.format(group=name), below)
        make = _nccl if backend == "nccl" else dist.ProcessGroupGloo
        self._group: Any = make(below, 0, size, timeout)

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """Sends these, one after the other, from here to all others; returns when they may be written to again."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # a thread has a device of its own
        for work in [self._group.broadcast([tensor], options) for tensor in tensors]:
            work.wait()
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def abort(self) -> None:
        """Ends it at once, whatever it waits for."""
        with contextlib.suppress(RuntimeError, AttributeError):  # gloo's of older versions knows no such word
            self._group.abort()


def _nccl(store: Any, rank: int, size: int, timeout: datetime.timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    # By default its watchdog ends this process, and so the job, where a server does not take part any more.
    with _variable("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2"):
        return dist.ProcessGroupNCCL(store, rank, size, options)


@contextlib.contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def in_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """What `work` returns or raises, once it is done. Nobody waits for it at the end of the process."""
    done: concurrent.futures.Future[T] = concurrent.futures.Future()
    done.set_running_or_notify_cancel()  # who gives up waiting does not end it

    def run() -> None:
        try:
            done.set_result(work())
        except Exception as error:
            done.set_exception(error)

    threading.Thread(target=run, name="weights", daemon=True).start()
    return asyncio.wrap_future(done)
