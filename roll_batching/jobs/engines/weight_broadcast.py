"""Broadcasts weights to servers over process groups, without files, one bucket at a time.

Each server has a process group with this process. In one group of all servers, a server that dies in a broadcast would
end the others under NCCL, by its watchdog; this way it is dropped alone, and joins again after a restart. The cost:
this process sends the weights once per server.

Servers create their groups with the helpers of `init_process_group`, under a name that we send, and use store keys
below that name (`PREFIXES`). `new_group` only takes ranks of the default group, so we create the backend object itself.
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
import uuid
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from roll_batching.errors import EngineError
from roll_batching.jobs.engines.protocol import GroupRendezvous, ServerApi, WeightReceiverApi
from roll_batching.jobs.engines.replicas import Replicas
from roll_batching.jobs.processes.requests import HEALTH_SECONDS, RequestFailed, get, post
from roll_batching.jobs.processes.role_workers import local_store

T = TypeVar("T")

PREFIXES = {"gloo": ("{group}", "{group}/", "cpu/"), "nccl": ("{group}", "{group}/", "cuda/")}
"""Prefixes of the store's keys by backend, the outermost first: one of SGLang's `init_custom_process_group`, two of
torch's `_new_process_group_helper` (`torch/distributed/distributed_c10d.py`, 2.13)."""


def backend_for(device: torch.device) -> str:
    """The torch backend that broadcasts tensors on `device`."""
    return "nccl" if device.type == "cuda" else "gloo"


def new_store(urls: Iterable[str]) -> dist.TCPStore:
    """Makes a rendezvous store for the servers at `urls`, on a free port.

    It listens on the loopback interface alone if all servers are on this machine, since every client of a store may
    write; else on all interfaces.
    """
    if all(_is_loopback(urllib.parse.urlsplit(url).hostname or "") for url in urls):
        store: dist.TCPStore = local_store()
        return store
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _is_loopback(host: str) -> bool:
    try:
        addresses = {socket_address[0] for *_, socket_address in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    # After `%` an IPv6 address names an interface.
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
    """Runs `work` in a daemon thread, which does not delay the end of the process; returns its future."""
    done: concurrent.futures.Future[T] = concurrent.futures.Future()
    done.set_running_or_notify_cancel()  # cancelling the wrapping future must not cancel this one

    def run() -> None:
        try:
            done.set_result(work())
        except Exception as error:
            done.set_exception(error)

    threading.Thread(target=run, name="weights", daemon=True).start()
    return asyncio.wrap_future(done)


# ---- weight broadcast


_MARGIN = 10.0
"""Seconds by which a group's timeout exceeds the request's, whose error names the cause."""


class BroadcastServerApi(ServerApi, WeightReceiverApi, Protocol):
    """API of servers that generate, and receive weights over a process group."""


class WeightBroadcast:
    """Sends weights on `device` to the servers of `replicas`, whose API is `api`.

    An update is `begin`, `send` for every bucket, `end`. A server that fails, or exceeds the time limit of a request,
    is dropped until the next update, and operations with it are aborted. All methods raise EngineError when no server
    is left.
    """

    def __init__(self, replicas: Replicas, api: BroadcastServerApi, device: torch.device) -> None:
        self._replicas, self._api, self._device = replicas, api, device
        self._seconds = replicas.limits.seconds
        self._store = new_store(replicas.urls)
        self._groups: dict[str, WeightGroup] = {}
        """By URL, the process groups of servers that received the whole last update."""
        self._sent_version: int | None = None
        """Version of the last update."""

    def begin(self, *, asleep: bool = False) -> None:
        """Has all servers, also dropped ones, pause and join their process groups; `asleep`: they sleep now."""
        replicas = self._replicas

        async def join(session: Any, url: str) -> None:
            for call in self._api.before_update(asleep=asleep):
                replicas.check_reply(call, await post(session, url, call))
            await self._join(session, url)

        errors = replicas.on_each(replicas.urls, join)
        replicas.set_live(dict.fromkeys(replicas.urls), replicas.version)
        self._drop(errors)

    def send(self, tensors: Sequence[tuple[str, torch.Tensor]], version: int | None = None) -> int:
        """Sends tensors to all servers, with `version` if they are the last ones; returns the bytes sent."""

        async def send(session: Any, url: str) -> None:
            group = self._groups[url]
            call = self._api.receive_call(tensors, group.name, version)
            values = [tensor for _, tensor in tensors]
            reply, _ = await self._wait_for_both(post(session, url, call), lambda: group.broadcast(values))
            self._replicas.check_reply(call, reply)

        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # the tensors must be complete: groups use other streams
        count = len(self._replicas.live)
        self._drop(self._replicas.on_each(tuple(self._replicas.live), send))
        if version is not None:
            self._sent_version = version
        return count * sum(tensor.nbytes for _, tensor in tensors)

    def end(self, version: int, *, asleep: bool = False) -> None:
        """Has the servers continue with the weights of `version`; `asleep`: wakes them up."""
        live = self._replicas.live
        self._drop(self._replicas.send_calls(tuple(live), self._api.after_update(asleep=asleep)))
        self._replicas.set_live(self._replicas.live, version)

    def close(self) -> None:
        """Leaves the process groups, with a short time limit."""
        groups, self._groups = self._groups, {}

        async def leave(session: Any, url: str) -> None:
            with contextlib.suppress(TimeoutError):
                call = self._api.leave_call(groups[url].name)
                await asyncio.wait_for(post(session, url, call), HEALTH_SECONDS)

        self._replicas.on_each(tuple(groups), leave)
        for group in groups.values():
            group.abort()

    # ---- one server

    async def _join(self, session: Any, url: str) -> None:
        """Joins a new process group with the server, unless the group of the last update still exists there.

        A restarted server has lost its group, which shows in a weight version other than the last one sent.
        """
        info = await self._info(session, url)
        if url in self._groups and self._api.weight_version(info) == str(self._sent_version):
            return
        self._abort_group(url)
        name, size = f"roll-batching-{uuid.uuid4().hex}", 1 + self._api.world_size(info)
        try:
            address = await run_in_thread(lambda: local_address_for(url, HEALTH_SECONDS))
        except OSError as error:
            raise RequestFailed(f"{type(error).__name__} {error}") from None
        rendezvous = GroupRendezvous(
            address=address, port=self._store.port, group=name, size=size, backend=backend_for(self._device)
        )
        call = self._api.join_call(rendezvous)
        reply, group = await self._wait_for_both(
            post(session, url, call),
            lambda: WeightGroup(self._store.port, name, size, self._device, self._seconds + _MARGIN),
        )
        self._replicas.check_reply(call, reply)
        self._groups[url] = group

    async def _info(self, session: Any, url: str) -> Any:
        for path in self._api.info_paths[:-1]:
            with contextlib.suppress(EngineError):  # the server lacks the path
                return await get(session, url, path)
        return await get(session, url, self._api.info_paths[-1])

    async def _wait_for_both(self, request: Coroutine[Any, Any, Any], work: Callable[[], T]) -> tuple[Any, T]:
        """Waits for the reply to `request` and for `work` in a thread; returns both results.

        Raises RequestFailed or EngineError for the first failure, and after the time limit of a request.
        """
        reply, result = asyncio.ensure_future(request), run_in_thread(work)
        await asyncio.wait((reply, result), timeout=self._seconds, return_when=asyncio.FIRST_EXCEPTION)
        try:
            if reply.done():
                reply.result()
            if result.done():
                result.result()
            if reply.done() and result.done():
                return reply.result(), result.result()
        except EngineError:
            raise
        except RuntimeError as error:  # torch's
            raise RequestFailed(f"its process group: {error}") from None
        finally:
            for future in (reply, result):
                future.add_done_callback(_retrieve_exception)
                future.cancel()
        raise RequestFailed(
            f"it did not do its part in actor_infer.engine_args.request_timeout = {self._seconds:g} seconds"
        )

    def _drop(self, errors: dict[str, str]) -> None:
        for url in errors:
            self._abort_group(url)
        self._replicas.drop(
            errors,
            "took the weights that were sent",
            "Servers must run at actor_infer.engine_args.urls, of one model with the job's, and reach this machine",
        )

    def _abort_group(self, url: str) -> None:
        group = self._groups.pop(url, None)
        if group is not None:
            group.abort()


def _retrieve_exception(future: asyncio.Future[Any]) -> None:
    """Retrieves the exception of an abandoned future, which asyncio would log otherwise."""
    if not future.cancelled():
        future.exception()
