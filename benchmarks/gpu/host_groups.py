"""Process groups of several ranks on one GPU: collectives through host memory and gloo.

NCCL refuses two ranks on one device, and gloo has no all-to-all, reduce-scatter or point-to-point for CUDA. These
groups copy to pinned memory, let gloo exchange that, and copy back, with NCCL's rules of time:

- a collective starts behind the work that the current stream has when it is called;
- its inputs are read on a stream of the group, later than the call returns;
- its outputs are NaN until `wait`, which makes the current stream wait for them.

So code that changes an input too early, reads an output without waiting, or gives a buffer back that is still read,
computes wrong numbers, as it may with NCCL. On the CPU a thread of the group reads the inputs. Nothing here is fast.
"""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions

BACKEND = "through_host"
HostOf = Callable[[torch.Tensor], torch.Tensor]


def register() -> None:
    """Make `BACKEND` known to torch.distributed, for CPU and CUDA tensors; once per process."""
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, HostGroup, devices=["cpu", "cuda"])


class Exchange(dist.Work):
    """A collective that is under way."""

    def __init__(
        self,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        post: Callable[[HostOf], Any],
        stream: Any,
    ) -> None:
        super().__init__()
        self._reads, self._writes, self._post = list(reads), list(writes), post
        self._posted, self._is_done = threading.Event(), False
        self._work: Any = None
        self._error: BaseException | None = None
        self._is_cuda = stream is not None and any(x.is_cuda for x in (*reads, *writes))
        self._hosts: dict[int, torch.Tensor] = {}
        for x in (*self._reads, *self._writes):
            if id(x) not in self._hosts:
                self._hosts[id(x)] = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda)
        self._read: Any = None
        if self._is_cuda:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._read_inputs()
                for x in (*self._reads, *self._writes):
                    if x.is_cuda:
                        x.record_stream(stream)
            self._read = stream.record_event()

    def _read_inputs(self) -> None:
        for x in self._reads:
            self._hosts[id(x)].copy_(x.detach(), non_blocking=True)
        inputs = {x.untyped_storage().data_ptr(): x for x in self._reads}
        for x in self._writes:
            shared = inputs.get(x.untyped_storage().data_ptr())
            if x.is_floating_point() and (shared is None or shared is x):
                x.data.fill_(float("nan"))

    def post(self) -> None:
        """Start gloo's part, in the thread of the group."""
        try:
            if self._read is not None:
                self._read.synchronize()
            elif not self._is_cuda:
                self._read_inputs()
            self._work = self._post(lambda x: self._hosts[id(x)])
        except BaseException as error:  # raised where the result is awaited
            self._error = error
        self._posted.set()

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Wait for gloo, and write the outputs on the current stream."""
        self._posted.wait()
        if self._error is not None:
            raise self._error
        if not self._is_done:
            self._is_done = True
            if self._work is not None:
                self._work.wait()
            if self._read is not None:
                torch.cuda.current_stream().wait_event(self._read)
            for x in self._writes:
                x.data.copy_(self._hosts[id(x)], non_blocking=True)
        return True

    def is_completed(self) -> bool:
        """Whether gloo has finished."""
        return self._posted.is_set() and (self._work is None or bool(self._work.is_completed()))


class HostGroup(dist.ProcessGroup):
    """A process group whose collectives are `Exchange`s over a gloo group of the same ranks."""

    def __init__(self, store: Any, rank: int, size: int, timeout: datetime.timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None
        self._queue: SimpleQueue[Exchange | None] = SimpleQueue()
        threading.Thread(target=self._post_in_order, daemon=True).start()

    def _post_in_order(self) -> None:
        while (exchange := self._queue.get()) is not None:
            exchange.post()

    def _run(
        self, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor], post: Callable[[HostOf], Any]
    ) -> Exchange:
        exchange = Exchange(reads, writes, post, self._stream)
        self._queue.put(exchange)
        return exchange

    def _get_backend(self, device: torch.device) -> Any:
        return self._gloo

    def getBackendName(self) -> str:  # noqa: N802, torch calls it
        return BACKEND

    def shutdown(self) -> None:
        self._queue.put(None)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> Exchange:
        return self._run(tensors, tensors, lambda host: self._gloo.allreduce([host(x) for x in tensors], opts))

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any) -> Exchange:
        return self._run(
            tensors, tensors, lambda host: self._gloo.allreduce_coalesced([host(x) for x in tensors], opts)
        )

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> Exchange:
        reads = tensors if self.rank() == opts.rootRank else []
        return self._run(reads, tensors, lambda host: self._gloo.broadcast([host(x) for x in tensors], opts))

    def reduce(self, tensors: list[torch.Tensor], opts: Any) -> Exchange:
        return self._run(tensors, tensors, lambda host: self._gloo.reduce([host(x) for x in tensors], opts))

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Exchange:
        def post(host: HostOf) -> Any:
            lists = [[host(x) for x in one] for one in outputs], [host(x) for x in inputs]
            return self._gloo.allgather(*lists, *([] if opts is None else [opts]))

        return self._run(inputs, [x for one in outputs for x in one], post)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> Exchange:
        return self._run([input], [output], lambda host: self._gloo._allgather_base(host(output), host(input), opts))

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> Exchange:
        return self._run(
            [input], [output], lambda host: self._gloo._reduce_scatter_base(host(output), host(input), opts)
        )

    def reduce_scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any) -> Exchange:
        def post(host: HostOf) -> Any:
            return self._gloo.reduce_scatter(
                [host(x) for x in outputs], [[host(x) for x in one] for one in inputs], opts
            )

        return self._run([x for one in inputs for x in one], outputs, post)

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Exchange:
        options = AllgatherOptions() if opts is None else opts  # torch 2.11 passes none

        def post(host: HostOf) -> Any:
            pairs = zip(outputs, inputs, strict=True)
            return _All([self._gloo._allgather_base(host(one), host(other), options) for one, other in pairs])

        return self._run(inputs, outputs, post)

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any
    ) -> Exchange:
        def post(host: HostOf) -> Any:
            pairs = zip(outputs, inputs, strict=True)
            return _All([self._gloo._reduce_scatter_base(host(one), host(other), opts) for one, other in pairs])

        return self._run(inputs, outputs, post)

    def all_to_all_single(
        self, output: torch.Tensor, input: torch.Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any
    ) -> Exchange:
        return self._run(
            [input],
            [output],
            lambda host: self._gloo.alltoall_base(host(output), host(input), output_sizes, input_sizes, opts),
        )

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any) -> Exchange:
        return self._run(
            inputs,
            outputs,
            lambda host: self._gloo.alltoall([host(x) for x in outputs], [host(x) for x in inputs], opts),
        )

    def gather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any) -> Exchange:
        def post(host: HostOf) -> Any:
            return self._gloo.gather([[host(x) for x in one] for one in outputs], [host(x) for x in inputs], opts)

        return self._run(inputs, [x for one in outputs for x in one], post)

    def scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any) -> Exchange:
        def post(host: HostOf) -> Any:
            return self._gloo.scatter([host(x) for x in outputs], [[host(x) for x in one] for one in inputs], opts)

        return self._run([x for one in inputs for x in one], outputs, post)

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Exchange:
        return self._run(tensors, [], lambda host: self._gloo.send([host(x) for x in tensors], rank, tag))

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Exchange:
        return self._run([], tensors, lambda host: self._gloo.recv([host(x) for x in tensors], rank, tag))

    def barrier(self, opts: Any = None) -> Exchange:
        if self._stream is not None:
            torch.cuda.synchronize()
        return self._run([], [], lambda host: self._gloo.barrier(*([] if opts is None else [opts])))

    # Names before torch 2.13.
    _allgather_base, _reduce_scatter_base, alltoall_base = all_gather_single, reduce_scatter_single, all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


class _All:
    """Several of gloo's works as one."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)
