"""Program of a pipeline stage: its passes and its calls of the communicator, in Megatron's order.

Megatron's schedules without overlap (`overlap_p2p_comm: false`, as strategies run them) send and receive between
passes, and a call returns when all its transfers are done. In the interleaved schedule an activation therefore leaves a
stage only after the backward pass that follows it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from roll_batching.errors import PlanError
from roll_batching.planning.pipeline.num_micro_batches import is_admissible
from roll_batching.planning.pipeline.schedule import schedule_table


@dataclass(frozen=True)
class Pass:
    """Forward or backward pass of one micro-batch through one model chunk."""

    is_backward: bool
    index: int
    """Micro-batch, counted on its rank."""
    chunk: int


@dataclass(frozen=True)
class Transfers:
    """One blocking call of the communicator; it returns when all its transfers are done."""

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
    stage: int, stages: int, count: int, chunks: int = 1, group_size: int | None = None
) -> tuple[Instruction, ...]:
    """Instructions of one stage for `count` micro-batches; `group_size` as in Megatron's interleaved schedule."""
    if stages == 1:
        return tuple(Pass(is_backward, index, 0) for index in range(count) for is_backward in (False, True))
    if chunks == 1:
        program = _plain_program(stage, stages, count)
    else:
        size = stages if group_size is None else group_size
        if not is_admissible(count, stages, size):
            raise PlanError(f"{count} micro-batches in groups of {size} cannot interleave over {stages} stages")
        program = _Interleaved(stage, stages, count, chunks, size).program()
    return tuple(one for one in program if one or isinstance(one, Pass))


def _plain_program(stage: int, stages: int, count: int) -> list[Instruction]:
    """1F1B: warm-up, one forward and one backward pass in turn, cool-down."""
    is_first, is_last = stage == 0, stage == stages - 1
    warm_up = min(stages - stage - 1, count)
    steady = count - warm_up
    program: list[Instruction] = []

    def send_next(index: int) -> int | None:
        return None if is_last else index

    def send_prev(index: int) -> int | None:
        return None if is_first else index

    for index in range(warm_up):
        program += [
            Transfers(receive_prev=not is_first),
            Pass(False, index, 0),
            Transfers(send_next=send_next(index)),
        ]
    if steady:
        program.append(Transfers(receive_prev=not is_first))
    for index in range(steady):
        program += [
            Pass(False, warm_up + index, 0),
            Transfers(send_next=send_next(warm_up + index), receive_next=not is_last),
            Pass(True, index, 0),
            Transfers(send_prev=send_prev(index), receive_prev=not is_first and index < steady - 1),
        ]
    for index in range(steady, count):
        program += [
            Transfers(receive_next=not is_last),
            Pass(True, index, 0),
            Transfers(send_prev=send_prev(index)),
        ]
    return program


class _Interleaved:
    """Megatron's interleaved schedule on one stage."""

    def __init__(self, stage: int, stages: int, count: int, chunks: int, group_size: int) -> None:
        self.stages, self.chunks = stages, chunks
        self.is_first, self.is_last = stage == 0, stage == stages - 1
        self.table = schedule_table(count, chunks, group_size)
        self.warm_up = min(2 * (stages - stage - 1) + (chunks - 1) * group_size, len(self.table))

    def program(self) -> list[Instruction]:
        """Warm-up, one forward and one backward pass in turn, cool-down."""
        total, warm_up = len(self.table), self.warm_up
        program: list[Instruction] = [Transfers(receive_prev=not self.is_first)]
        for k in range(warm_up):
            begins_steady = k == warm_up - 1 and warm_up < total
            program += [
                self._forward(k),
                Transfers(
                    send_next=self._send_next(k),
                    receive_prev=self._receives(k, forward=True) and k < total - 1,
                    receive_next=begins_steady and not self.is_last,
                ),
            ]
        for k in range(total - warm_up):
            program += [
                self._forward(k + warm_up),
                self._backward(k),
                Transfers(
                    send_next=self._send_next(k + warm_up),
                    send_prev=self._send_prev(k),
                    receive_prev=self._receives(k + warm_up, forward=True) and k < total - warm_up - 1,
                    receive_next=self._receives(k, forward=False),
                ),
            ]
        if warm_up == total:
            program.append(Transfers(receive_next=not self.is_last))
        for k in range(total - warm_up, total):
            program += [
                self._backward(k),
                Transfers(
                    send_prev=self._send_prev(k),
                    receive_next=self._receives(k, forward=False) and k < total - 1,
                ),
            ]
        return program

    def _forward(self, k: int) -> Pass:
        return Pass(False, self.table[k][0], self._chunk(k, forward=True))

    def _backward(self, k: int) -> Pass:
        return Pass(True, self.table[k][0], self._chunk(k, forward=False))

    def _chunk(self, k: int, *, forward: bool) -> int:
        chunk = self.table[k % len(self.table)][1]
        return chunk if forward else self.chunks - chunk - 1

    def _send_next(self, k: int) -> int | None:
        is_model_end = self.is_last and self._chunk(k, forward=True) == self.chunks - 1
        return None if is_model_end else self.table[k][0]

    def _send_prev(self, k: int) -> int | None:
        is_model_start = self.is_first and self._chunk(k, forward=False) == 0
        return None if is_model_start else self.table[k][0]

    def _receives(self, k: int, *, forward: bool) -> bool:
        """Whether the call after pass `k` receives the input of a later one."""
        is_leading = self.is_first if forward else self.is_last
        if not is_leading:
            return True
        # The leading stage is ahead of the ending stage, which sends to it, by stages - 1 passes.
        aligned = k - (self.stages - 1)
        if aligned < 0:
            return False
        ends = self.chunks - 1 if forward else 0
        return self._chunk(aligned, forward=forward) != ends
