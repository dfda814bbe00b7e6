"""A torch process group of this process and the ranks of one server, outside of the job's default group.

Servers create theirs with the helpers of `init_process_group`, under a name that we send, and use store keys below that
name (`PREFIXES`). `new_group` only takes ranks of the default group, so we create the backend object itself.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import datetime
import ipaddress
import os
import socket
import threading
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from roll_batching.jobs.processes.role_workers import local_store

T = TypeVar("T")

PREFIXES = {"gloo": ("{group}", "{group}/", "cpu/"), "nccl": ("{group}", "{group}/", "cuda/")}
"""Prefixes of the store's keys by backend, the outermost first: one of SGLang's `init_custom_process_group`, two of
torch's `_new_process_group_helper` (`torch/distributed/distributed_c10d.py`, 2.13)."""


def backend_for(device: torch.device) -> str:
    """The backend for tensors on `device`."""
    return "nccl" if device.type == "cuda" else "gloo"


def new_store(urls: Iterable[str]) -> dist.TCPStore:
    """A rendezvous store for the servers at `urls`, on a free port.

    It listens on the loopback interface, and on all where a server may be on another machine: every client of a store
    may write.
    """
    if all(_is_loopback(urllib.parse.urlsplit(url).hostname or "") for url in urls):
        store: dist.TCPStore = local_store()
        return store
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _is_loopback(host: str) -> bool:
    try:
        addresses = {place[4][0] for place in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return all(ipaddress.ip_address(str(address).partition("%")[0]).is_loopback for address in addresses)


def local_address_for(url: str, seconds: float) -> str:
    """The address of this machine that the server at `url` can reach. Raises OSError if `url` does not answer."""
    parts = urllib.parse.urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    with socket.create_connection((parts.hostname or "", port), timeout=seconds) as connection:
        address: str = connection.getsockname()[0]
        return address


class WeightGroup:
    """The process group `name` of `size` ranks, with this process as rank 0 and the rendezvous store on `port`.

    `__init__` waits for all ranks. Raises RuntimeError after `seconds`, and when a rank dies.
    """

    def __init__(self, port: int, name: str, size: int, device: torch.device, seconds: float) -> None:
        self.name, self.device = name, device
        timeout, backend = datetime.timedelta(seconds=seconds), backend_for(device)
        # Not shared with other groups: a connection is blocked while it waits for a server that does not join.
        store: Any = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timeout)
        for prefix in PREFIXES[backend]:
            store = dist.PrefixStore(prefix.format(group=name), store)
        make = _nccl if backend == "nccl" else dist.ProcessGroupGloo
        self._group: Any = make(store, 0, size, timeout)

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """Broadcasts the tensors one by one from this process; returns when they may be overwritten."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # the current device is per thread
        for work in [self._group.broadcast([tensor], options) for tensor in tensors]:
            work.wait()
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def abort(self) -> None:
        """Ends the group at once, with the operation that it waits for."""
        with contextlib.suppress(RuntimeError, AttributeError):  # older versions of gloo's groups have no abort
            self._group.abort()


def _nccl(store: Any, rank: int, size: int, timeout: datetime.timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    # By default NCCL's watchdog ends this process, and so the job, when a server stops taking part.
    with _set_variable("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2"):
        return dist.ProcessGroupNCCL(store, rank, size, options)


@contextlib.contextmanager
def _set_variable(name: str, value: str) -> Iterator[None]:
    previous = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if previous is None:
            del os.environ[name]
        else:
            os.environ[name] = previous


def run_in_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """Future of `work` in a daemon thread, which does not delay the end of the process."""
    done: concurrent.futures.Future[T] = concurrent.futures.Future()
    done.set_running_or_notify_cancel()  # cancelling the wrapping future must not cancel this one

    def run() -> None:
        try:
            done.set_result(work())
        except Exception as error:
            done.set_exception(error)

    threading.Thread(target=run, name="weights", daemon=True).start()
    return asyncio.wrap_future(done)
