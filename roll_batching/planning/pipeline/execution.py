"""Execution of Megatron's pipeline schedules on all data-parallel ranks, event by event.

The one executor: simulated steps and timelines of plans come from it, and the compiled makespans, by which the planner
searches, are tested against it.

1. A pass starts when all ranks that compute it together have reached it, and takes as long as the slowest of them.
2. Megatron's schedules without overlap (`overlap_p2p_comm: false`, as strategies run them) send and receive between
   passes. A call of the communicator returns when all its transfers are done, and a transfer starts when sender and
   receiver have called for it. In the interleaved schedule an activation therefore leaves a stage only after the
   backward pass that follows it.
3. Where receives are posted ahead, a transfer runs beside passes, from the end of the pass that made the output, and
   only its receiver waits for it. So the planner assumes, with transfers that take no time, and so run slices of packs,
   in the order of `pipeline.slices`.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from roll_batching.errors import PlanError
from roll_batching.planning.pipeline.schedule import Pass, dependency_of, stage_operations
from roll_batching.planning.pipeline.slices import slice_operations
from roll_batching.planning.plan_arrays import PlanArrays

Times = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


@dataclass(frozen=True)
class Transfers:
    """One call of the communicator; Megatron's returns when all its transfers are done."""

    send_next: int | None = None
    """Micro-batch whose activations go to the next stage."""
    send_prev: int | None = None
    """Micro-batch whose gradients go to the previous stage."""
    receive_prev: bool = False
    receive_next: bool = False

    def __bool__(self) -> bool:
        return self.receive_prev or self.receive_next or self.send_next is not None or self.send_prev is not None


Instruction = Pass | Transfers


@lru_cache(maxsize=4096)
def stage_program(
    stage: int,
    stages: int,
    count: int,
    chunks: int = 1,
    group_size: int | None = None,
    *,
    posts_receives: bool = False,
) -> tuple[Instruction, ...]:
    """Passes of one stage for `count` micro-batches and its calls of the communicator, in order.

    `group_size` as in Megatron's interleaved schedule. With free transfers each pass has separate calls.
    """
    passes = stage_operations(stage, stages, count, chunks, group_size)
    if chunks > 1 and not posts_receives:
        warm_up = 2 * (stages - stage - 1) + (chunks - 1) * (group_size or stages)
        program = _interleaved_program(passes, stage, stages, chunks, warm_up)
    else:
        program = _plain_program(passes, stage, stages, chunks)
    return tuple(instruction for instruction in program if instruction)


def _separate_calls(passes: Sequence[Pass], stage: int, stages: int) -> Iterator[Instruction]:
    """A call before each pass that receives its input, and one after it that sends its output."""
    for operation in passes:
        is_backward, is_end = operation.is_backward, stage == (stages - 1 if operation.is_backward else 0)
        yield Transfers(receive_prev=not is_backward and not is_end, receive_next=is_backward and not is_end)
        yield operation
        yield _send(operation, stage, stages, 1)


def _send(operation: Pass, stage: int, stages: int, chunks: int) -> Transfers:
    """Call that passes on the output of a pass; empty at the ends of the model."""
    if operation.is_backward:
        return Transfers() if stage == operation.chunk == 0 else Transfers(send_prev=operation.micro_batch)
    is_model_end = stage == stages - 1 and operation.chunk == chunks - 1
    return Transfers() if is_model_end else Transfers(send_next=operation.micro_batch)


def _plain_program(passes: Sequence[Pass], stage: int, stages: int, chunks: int) -> list[Instruction]:
    """1F1B: where a forward and a backward pass alternate, one call sends an output and receives the next input."""
    alternates = len(passes) // 2 > stages - stage - 1  # else all forward passes are warm-up
    program: list[Instruction] = []
    previous, send = passes[0], Transfers()
    for operation in passes:
        source = dependency_of(operation, stage, stages, chunks)
        receives = source is not None and source[1] != stage
        receive = {"receive_next" if operation.is_backward else "receive_prev": receives}
        if alternates and previous.kind != operation.kind:
            program.append(replace(send, **receive))
        else:
            program += [send, Transfers(**receive)]
        program.append(operation)
        previous, send = operation, _send(operation, stage, stages, chunks)
    return [*program, send]


def _interleaved_program(
    passes: Sequence[Pass], stage: int, stages: int, chunks: int, warm_up: int
) -> list[Instruction]:
    """Megatron's interleaved schedule: warm-up, one forward and one backward pass in turn, cool-down."""
    forward, backward = ([operation for operation in passes if operation.kind == kind] for kind in "FB")
    is_first, is_last, total = stage == 0, stage == stages - 1, len(forward)
    warm_up = min(warm_up, total)

    def send(operation: Pass) -> Transfers:
        return _send(operation, stage, stages, chunks)

    def receives(number: int, *, is_backward: bool) -> bool:
        """Whether the call after pass `number` of its kind receives the input of a later one."""
        if not (is_last if is_backward else is_first):
            return True
        # The leading stage is ahead of the ending stage, which sends to it, by stages - 1 passes.
        aligned, ends = number - (stages - 1), 0 if is_backward else chunks - 1
        return aligned >= 0 and (backward if is_backward else forward)[aligned].chunk != ends

    program: list[Instruction] = [Transfers(receive_prev=not is_first)]
    for k in range(warm_up):
        begins_steady = k == warm_up - 1 and warm_up < total
        takes_input = receives(k, is_backward=False) and k < total - 1
        call = replace(send(forward[k]), receive_prev=takes_input, receive_next=begins_steady and not is_last)
        program += [forward[k], call]
    for k in range(total - warm_up):
        forward_operation, backward_operation = forward[k + warm_up], backward[k]
        call = Transfers(
            send_next=send(forward_operation).send_next,
            send_prev=send(backward_operation).send_prev,
            receive_prev=receives(k + warm_up, is_backward=False) and k < total - warm_up - 1,
            receive_next=receives(k, is_backward=True),
        )
        program += [forward_operation, backward_operation, call]
    if warm_up == total:
        program.append(Transfers(receive_next=not is_last))
    for k in range(total - warm_up, total):
        takes_gradient = receives(k, is_backward=True) and k < total - 1
        program += [backward[k], replace(send(backward[k]), receive_next=takes_gradient)]
    return program


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
    shares: Sequence[float] | None = None,
    posts_receives: bool = False,
    slices: Sequence[tuple[int, ...]] | None = None,
) -> Timeline:
    """Passes of all ranks and stages with their times.

    `lists[rank]` are indices into `passes` in the order of execution. With `shares` a model chunk takes its share of
    the time of a pass, in the order of the layers. With `slices`, by rank the numbers of slices of its packs, passes
    are of slices in forward order. Raises `PlanError` where ranks wait for each other in a circle.
    """

    def program(rank: int, stage: int) -> tuple[Instruction, ...]:
        if slices is not None:
            return tuple(filter(None, _separate_calls(slice_operations(slices[rank], stage, stages), stage, stages)))
        return stage_program(stage, stages, len(lists[rank]), chunks, group_size, posts_receives=posts_receives)

    processes = [[_Process(rank, stage, program(rank, stage)) for stage in range(stages)] for rank in range(len(lists))]
    posts_receives = posts_receives or slices is not None
    _Execution(lists, passes, processes, shares or (1.0,) * (stages * chunks), posts_receives).run()
    return [[process.events for process in of_rank] for of_rank in processes]


def packs_of_ranks(plan: PlanArrays) -> list[list[int]]:
    """Micro-batches of each data-parallel rank, in the order of execution."""
    if plan.blocks is not None:
        return plan.blocks.lists
    count = plan.num_micro_batches
    return [list(range(rank * count, (rank + 1) * count)) for rank in range(plan.constraints.dp_size)]


def units_of_ranks(plan: PlanArrays) -> tuple[list[list[int]], list[int]]:
    """(Units of each data-parallel rank in forward order, micro-batch of each unit): slices, or micro-batches."""
    packs, every = packs_of_ranks(plan), np.arange(len(plan.tokens))
    if plan.slices is None:
        return packs, every.tolist()
    pack_of = np.repeat(every, plan.slices.counts)  # plans with slices have no blocks: ranks' packs are consecutive
    return [np.flatnonzero(np.isin(pack_of, of_rank)).tolist() for of_rank in packs], pack_of.tolist()


def execute_plan(plan: PlanArrays, forward: Times, backward: Times, *, transfer: Times | None = None) -> Timeline:
    """Execution of a plan whose units take these times on one pipeline stage, float64[units] each.

    Units are micro-batches, or the slices of a plan that has some. `transfer`: times of activations between stages,
    which block sender and receiver of whole micro-batches; None: transfers are free. Ranks with a common pack compute
    it together, and so do those that meet at every index.
    """
    (packs, _), constraints = units_of_ranks(plan), plan.constraints
    slices = None
    if plan.slices is not None:
        slices = [tuple(plan.slices.counts[of_rank].tolist()) for of_rank in packs_of_ranks(plan)]
    lists: list[list[int]] = [[] for _ in packs]
    joint: list[JointPass] = []
    for index in range(max(map(len, packs))):
        for ranks in _ranks_together(plan, packs, index):
            members = [packs[rank][index] for rank in ranks]
            joint.append(
                JointPass(
                    ranks=tuple(ranks),
                    forward=float(forward[members].max()) / constraints.vpp_size,
                    backward=float(backward[members].max()) / constraints.vpp_size,
                    transfer=0.0 if transfer is None else float(transfer[members].max()),
                )
            )
            for rank in ranks:
                lists[rank].append(len(joint) - 1)
    return execute(
        lists,
        joint,
        stages=constraints.pp_size,
        chunks=constraints.vpp_size,
        group_size=plan.group_size,
        shares=plan.chunk_shares,
        posts_receives=transfer is None,
        slices=slices,
    )


def _ranks_together(plan: PlanArrays, packs: Sequence[Sequence[int]], index: int) -> list[list[int]]:
    """Ranks that compute their micro-batch `index` together; blocks of ranks are consecutive."""
    width = plan.constraints.joint_ranks
    groups: list[list[int]] = []
    reach = 0
    for rank, of_rank in enumerate(packs):
        if index >= len(of_rank):
            continue
        if rank >= reach:
            groups.append([])
            reach = rank + 1
        groups[-1].append(rank)
        reach = max(reach, (rank // width + 1) * width)
        if plan.blocks is not None:
            pack = of_rank[index]
            reach = max(reach, int(plan.blocks.first_ranks[pack] + plan.blocks.cp_sizes[pack]))
    return groups


@dataclass(slots=True, eq=False)
class _Process:
    """A stage of a data-parallel rank."""

    rank: int
    stage: int
    program: tuple[Instruction, ...]
    place: int = 0
    """Index of the next instruction."""
    clock: float = 0.0
    """Time at which the process is free for it."""
    open_transfers: int = 0
    """Transfers of the current call that are not done."""
    call_end: float = 0.0
    """Latest end of the done transfers of the current call."""
    events: list[PassEvent] = field(default_factory=list)


class _Execution:
    """State of an execution: processes that can go on, and calls and passes that wait for other processes."""

    def __init__(
        self,
        lists: Sequence[Sequence[int]],
        passes: Sequence[JointPass],
        processes: list[list[_Process]],
        shares: Sequence[float],
        posts_receives: bool,
    ) -> None:
        self.lists, self.passes, self.processes = lists, passes, processes
        self.shares, self.posts_receives = shares, posts_receives
        self.ready = [process for of_rank in processes for process in of_rank]
        self.arrived: dict[tuple[int, int, Pass], list[_Process]] = {}
        # (rank, sending stage, whether forward): transfers pair in the order of the calls of senders and receivers.
        self.senders: dict[tuple[int, int, bool], deque[tuple[_Process, float, float]]] = defaultdict(deque)
        self.receivers: dict[tuple[int, int, bool], deque[tuple[_Process, float]]] = defaultdict(deque)

    def run(self) -> None:
        """Runs all processes to the end of their programs. Raises `PlanError` if some wait for each other forever."""
        while self.ready:
            process = self.ready.pop()
            goes_on = True
            while goes_on and process.place < len(process.program):
                instruction = process.program[process.place]
                if isinstance(instruction, Pass):
                    goes_on = self._compute(process, instruction)
                else:
                    goes_on = self._call(process, instruction)
        for process in (process for of_rank in self.processes for process in of_rank):
            if process.place < len(process.program):
                raise PlanError(
                    f"data-parallel rank {process.rank} waits forever on pipeline stage {process.stage}: its "
                    "micro-batches stand in another order than those of the ranks that compute with it; give "
                    "all one order"
                )

    def _compute(self, process: _Process, operation: Pass) -> bool:
        """Whether `process` completed a pass. The last rank to reach a joint pass completes it for all its ranks."""
        joint_index, stage = self.lists[process.rank][operation.micro_batch], process.stage
        joint = self.passes[joint_index]
        members = [process]
        if len(joint.ranks) > 1:
            members = self.arrived.setdefault((joint_index, stage, operation), [])
            members.append(process)
            if len(members) < len(joint.ranks):
                return False
            del self.arrived[joint_index, stage, operation]
        start = max(member.clock for member in members)
        share = self.shares[operation.chunk * len(self.processes[process.rank]) + stage]
        end = start + (joint.backward if operation.is_backward else joint.forward) * share
        event = PassEvent(operation.is_backward, operation.micro_batch, operation.chunk, start, end)
        for member in members:
            member.events.append(event)
            member.clock = end
            member.place += 1
            if member is not process:
                self.ready.append(member)
        return True

    def _call(self, process: _Process, call: Transfers) -> bool:
        """Whether all transfers of `call` are done. Otherwise the call of the last partner makes `process` ready."""
        rank, stage, stages = process.rank, process.stage, len(self.processes[process.rank])
        sends = [(call.send_next, True), (call.send_prev, False)]
        receives = [(call.receive_prev, (stage - 1) % stages, True), (call.receive_next, (stage + 1) % stages, False)]
        process.call_end, process.open_transfers = process.clock, call.receive_prev + call.receive_next
        channels = []
        for index, is_forward in sends:
            if index is not None:
                process.open_transfers += not self.posts_receives
                channels.append((rank, stage, is_forward))
                duration = self.passes[self.lists[rank][index]].transfer
                self.senders[channels[-1]].append((process, process.clock, duration))
        for is_received, sender, is_forward in receives:
            if is_received:
                channels.append((rank, sender, is_forward))
                self.receivers[channels[-1]].append((process, process.clock))
        if not process.open_transfers:
            process.place += 1
        for channel in channels:
            self._pair(channel, process)
        return process.open_transfers == 0

    def _pair(self, channel: tuple[int, int, bool], caller: _Process) -> None:
        """Completes the transfers of `channel` whose sender and receiver have both called."""
        senders, receivers = self.senders[channel], self.receivers[channel]
        while senders and receivers:
            sender, sent, duration = senders.popleft()
            receiver, awaited = receivers.popleft()
            end = max(sent + duration, awaited) if self.posts_receives else max(sent, awaited) + duration
            for process in (receiver,) if self.posts_receives else (sender, receiver):
                process.call_end = max(process.call_end, end)
                process.open_transfers -= 1
                if process.open_transfers == 0:
                    process.clock = process.call_end
                    process.place += 1
                    if process is not caller:
                        self.ready.append(process)
