"""Execution of the stage programs of all data-parallel ranks, event by event.

A pass starts when all ranks that compute it together have reached it, and takes as long as the slowest of them. A
transfer between stages starts when sender and receiver have called for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from roll_batching.errors import PlanError
from roll_batching.tools.simulation.stage_program import Instruction, Pass, stage_program


@dataclass(frozen=True)
class JointPass:
    """Micro-batches that several data-parallel ranks compute at the same time, or that one computes alone."""

    ranks: tuple[int, ...]
    forward: float
    """Time of the forward pass through one model chunk of one stage, of the slowest rank."""
    backward: float
    transfer: float = 0
    """Time of its activations, and of its gradients, to the neighbouring stage."""


@dataclass(frozen=True)
class PassEvent:
    """A pass that one stage of one data-parallel rank computed."""

    is_backward: bool
    index: int
    """Micro-batch, counted on its rank."""
    chunk: int
    start: float
    end: float


Timeline = list[list[list[PassEvent]]]
"""`timeline[rank][stage]`: passes in order."""


def execute(
    lists: Sequence[Sequence[int]],
    passes: Sequence[JointPass],
    *,
    stages: int = 1,
    chunks: int = 1,
    group_size: int | None = None,
) -> Timeline:
    """Passes of all ranks and stages with their times.

    `lists[rank]` are indices into `passes` in the order of execution. Raises `PlanError` where ranks would wait for
    each other in a circle.
    """
    processes = [
        [_Process(rank, stage, stage_program(stage, stages, len(packs), chunks, group_size)) for stage in range(stages)]
        for rank, packs in enumerate(lists)
    ]
    _Execution(lists, passes, processes).run()
    return [[process.events for process in of_rank] for of_rank in processes]


class _Process:
    """A stage of a data-parallel rank."""

    __slots__ = ("call_end", "clock", "events", "open_transfers", "place", "program", "rank", "stage")

    def __init__(self, rank: int, stage: int, program: tuple[Instruction, ...]) -> None:
        self.rank, self.stage, self.program = rank, stage, program
        self.place, self.clock = 0, 0.0
        self.open_transfers, self.call_end = 0, 0.0
        self.events: list[PassEvent] = []

    @property
    def is_done(self) -> bool:
        return self.place == len(self.program)


class _Channel:
    """One direction between two stages of a rank: transfers pair in the order of the calls."""

    __slots__ = ("receivers", "senders")

    def __init__(self) -> None:
        self.senders: deque[tuple[_Process, float, float]] = deque()
        self.receivers: deque[tuple[_Process, float]] = deque()


class _Execution:
    """State of an execution: processes that can go on, calls and passes that wait for others."""

    def __init__(
        self, lists: Sequence[Sequence[int]], passes: Sequence[JointPass], processes: list[list[_Process]]
    ) -> None:
        self.lists, self.passes, self.processes = lists, passes, processes
        self.ready = [process for of_rank in processes for process in of_rank]
        self.arrived: dict[tuple[int, int, Pass], list[_Process]] = {}
        self.channels: dict[tuple[int, int, bool], _Channel] = {}

    def run(self) -> None:
        while self.ready:
            self._advance(self.ready.pop())
        stuck = [process for of_rank in self.processes for process in of_rank if not process.is_done]
        if stuck:
            raise PlanError(
                f"data-parallel rank {stuck[0].rank} waits forever on pipeline stage {stuck[0].stage}: its "
                "micro-batches stand in another order than those of the ranks that compute with it"
            )

    def _advance(self, process: _Process) -> None:
        """Runs a process until it waits for another one, or ends."""
        while process.place < len(process.program):
            instruction = process.program[process.place]
            goes_on = self._compute(process, instruction) if isinstance(instruction, Pass) else self._call(process)
            if not goes_on:
                return

    def _compute(self, process: _Process, one: Pass) -> bool:
        """Whether `process` went through a pass; the last rank to reach it takes the others along."""
        number = self.lists[process.rank][one.index]
        joint = self.passes[number]
        if len(joint.ranks) == 1:
            members = [process]
        else:
            key = (number, process.stage, one)
            members = self.arrived.setdefault(key, [])
            members.append(process)
            if len(members) < len(joint.ranks):
                return False
            del self.arrived[key]
        start = max(member.clock for member in members)
        end = start + (joint.backward if one.is_backward else joint.forward)
        event = PassEvent(one.is_backward, one.index, one.chunk, start, end)
        for member in members:
            member.events.append(event)
            member.clock = end
            member.place += 1
            if member is not process:
                self.ready.append(member)
        return True

    def _call(self, process: _Process) -> bool:
        """Whether all transfers of a call are done at once; otherwise the last partner takes the process along."""
        call = process.program[process.place]
        assert not isinstance(call, Pass)
        stages, rank, stage = len(self.processes[process.rank]), process.rank, process.stage
        process.call_end = process.clock
        sends = (call.send_next is not None) + (call.send_prev is not None)
        process.open_transfers = sends + call.receive_prev + call.receive_next
        touched = []
        if call.send_next is not None:
            channel = self._channel(rank, stage, True)
            channel.senders.append((process, process.clock, self._transfer_time(rank, call.send_next)))
            touched.append(channel)
        if call.receive_prev:
            channel = self._channel(rank, (stage - 1) % stages, True)
            channel.receivers.append((process, process.clock))
            touched.append(channel)
        if call.send_prev is not None:
            channel = self._channel(rank, stage, False)
            channel.senders.append((process, process.clock, self._transfer_time(rank, call.send_prev)))
            touched.append(channel)
        if call.receive_next:
            channel = self._channel(rank, (stage + 1) % stages, False)
            channel.receivers.append((process, process.clock))
            touched.append(channel)
        for channel in touched:
            self._pair(channel, process)
        return process.open_transfers == 0

    def _pair(self, channel: _Channel, caller: _Process) -> None:
        while channel.senders and channel.receivers:
            sender, sent, duration = channel.senders.popleft()
            receiver, awaited = channel.receivers.popleft()
            end = max(sent, awaited) + duration
            for process in (sender, receiver):
                process.call_end = max(process.call_end, end)
                process.open_transfers -= 1
                if process.open_transfers == 0:
                    process.clock = process.call_end
                    process.place += 1
                    if process is not caller:
                        self.ready.append(process)

    def _channel(self, rank: int, sender: int, is_forward: bool) -> _Channel:
        return self.channels.setdefault((rank, sender, is_forward), _Channel())

    def _transfer_time(self, rank: int, index: int) -> float:
        return self.passes[self.lists[rank][index]].transfer
