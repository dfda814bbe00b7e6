"""The result of an optimizer step: loss, metrics and gradient norm over all ranks, or one error on all; and its phases.

Phases are timed on this rank without synchronising the device. On CUDA they are timed by events, which are read when
the step has ended, and every phase is an NVTX range. On the CPU, and for phases on the host, the wall clock is read.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from roll_batching.distributed.parallel_layout import ParallelLayout
from roll_batching.errors import LossError
from roll_batching.losses.contract import HostMetric, as_numbers, join_parts, to_host
from roll_batching.losses.runner import LossRunner, MicroBatchRecord
from roll_batching.packing.batch import unpack_results
from roll_batching.planning import Plan
from roll_batching.samples import FieldSpec, SampleBatch
from roll_batching.strategy.fault_messages import describe_weights
from roll_batching.strategy.model_state import ModelState
from roll_batching.strategy.schedule import Packs, layouts_of


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Loss, metrics, timing and FLOPs of one optimizer step; all but the times are equal on every rank."""

    loss: float
    """The loss over the whole mini-batch."""
    joined_metrics: dict[str, HostMetric]
    """Metrics of the loss over all micro-batches and ranks, with their kinds, so that steps can be joined too."""
    grad_norm: float
    """Gradient norm before clipping; NaN when it caused a skip, 0 when no token counted."""
    lr: float
    """Learning rate of the step."""
    skipped: bool
    """Whether the optimizer did not step: the gradient norm is not finite, or no mask of the loss counts a token."""
    seconds: float
    """Duration of the step on this rank, from packing to the updated weights; the device has finished them by then."""
    tokens: int
    """Real tokens of all ranks."""
    phases: dict[Phase, float]
    """Seconds of each phase on this rank: see `PHASES`."""
    flops: float | None
    """Forward and backward FLOPs of all ranks' real tokens, by `modeling.cost`, common prefixes of a pack once; None if
    the cost model has another unit."""
    unshared_flops: float | None
    """The same if every sample computed all its tokens: the work that the step stands for."""
    ranks: int
    """World size."""
    device_rate: float | None
    """Peak FLOP per second of one device, from its datasheet; None for an unknown device."""

    @property
    def metrics(self) -> dict[str, float]:
        """The loss's metrics as numbers."""
        return as_numbers(self.joined_metrics)

    @property
    def tokens_per_second(self) -> float:
        """Real tokens of all ranks per second."""
        return self.tokens / self.seconds

    @property
    def flops_per_second(self) -> float | None:
        """Model FLOPs per second and rank."""
        return None if self.flops is None else self.flops / self.seconds / self.ranks

    @property
    def unshared_flops_per_second(self) -> float | None:
        """`flops_per_second` of an equally long step that computes every sample by itself."""
        return None if self.unshared_flops is None else self.unshared_flops / self.seconds / self.ranks

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation: `flops_per_second` / `device_rate`."""
        rate = self.flops_per_second
        return None if rate is None or self.device_rate is None else rate / self.device_rate


@dataclass(frozen=True, kw_only=True)
class _RankResult:
    """Loss, metrics and errors of a pass on one rank, or joined over several."""

    loss: float
    metrics: Sequence[dict[str, HostMetric]]
    """One entry per reporting rank."""
    grad_square: float
    """Sum of squares of the gradients, replicas included; 0 in passes without gradient."""
    problems: tuple[str, ...]
    """Errors of the loss, such as a value that is not finite; empty: none."""
    infinite: bool
    """Whether a loss is not finite."""

    @classmethod
    def join(cls, results: Sequence[_RankResult]) -> _RankResult:
        return cls(
            loss=sum(result.loss for result in results),
            metrics=[metrics for result in results for metrics in result.metrics],
            grad_square=sum(result.grad_square for result in results),
            problems=tuple(dict.fromkeys(problem for result in results for problem in result.problems)),
            infinite=any(result.infinite for result in results),
        )


def join_results(
    state: ModelState,
    records: list[MicroBatchRecord],
    runner: LossRunner,
    grad_square: Callable[[], torch.Tensor] | None = None,
) -> tuple[float, dict[str, HostMetric], float]:
    """(loss, metrics, sum of squares of the gradients) of a pass over all ranks. Collective.

    One exchange, right after the first host read of the step, carries loss, metrics and errors together: a rank that
    found a bad loss cannot leave the others waiting in a later collective.

    Args:
        state: the model.
        records: this rank's loss and metrics per micro-batch.
        runner: the loss; its `error` is an error of the loss on this rank.
        grad_square: computes the sum of squares of this rank's gradients, on the device; None: no gradient.

    Raises:
        LossError: on all ranks, where a loss is not finite or broke its contract on any; names the samples.
    """
    layout = state.layout
    results = layout.team.join(
        "the step's loss", lambda: _rank_result(layout, records, runner, grad_square), _RankResult.join
    )
    total = _RankResult.join(results)
    if total.problems:
        weights = f". {describe_weights(state)}" if total.infinite else ""
        raise LossError("; ".join(total.problems) + weights) from runner.error
    return total.loss, join_parts(total.metrics), total.grad_square


def _rank_result(
    layout: ParallelLayout,
    records: list[MicroBatchRecord],
    runner: LossRunner,
    grad_square: Callable[[], torch.Tensor] | None,
) -> _RankResult:
    # Queued on the device before the host read below, so that one wait covers both.
    square = None if grad_square is None else grad_square()
    losses, metrics = to_host([r.loss for r in records], [r.metrics for r in records if r.is_counted])
    problem = None if runner.error is None else str(runner.error)
    bad = [r for r, value in zip(records, losses, strict=True) if not math.isfinite(value)]
    if problem is None and bad:
        samples = sorted({sample for record in bad for sample in record.nonfinite_samples()})
        value = losses[records.index(bad[0])]
        problem = (
            f"the loss is {value} for sample{'s' if len(samples) > 1 else ''} {', '.join(map(str, samples[:16]))}: "
            "look at these samples' fields and at what the loss computes from them. The optimizer made no step"
        )
    # Tensor-parallel ranks compute the same loss: one of them reports it. Of context-parallel ranks see `is_counted`.
    is_reporting = layout.is_last_stage and layout.tp_rank == 0
    counted = sum(value for record, value in zip(records, losses, strict=True) if record.is_counted)
    return _RankResult(
        loss=counted if is_reporting else 0.0,
        metrics=[metrics] if is_reporting and metrics else [],
        grad_square=0.0 if square is None else float(square),
        problems=() if problem is None else (problem,),
        infinite=bool(bad),
    )


def share_outputs(
    state: ModelState, local: SampleBatch, plan: Plan, packs: Packs, results: Sequence[torch.Tensor], names: list[str]
) -> SampleBatch:
    """The outputs `names` of a forward pass, [tokens, names] per pack, as fields of `local` on the host. Collective.

    Only the last stage has them; all ranks of the replica return them.
    """
    outputs = share_columns(state, local, plan, packs, results, len(names))
    fields = {name: outputs[:, i].contiguous() for i, name in enumerate(names)}
    return SampleBatch(local.ids, local.lengths, fields, dict.fromkeys(names, FieldSpec("next_token")))


def share_columns(
    state: ModelState, local: SampleBatch, plan: Plan, packs: Packs, results: Sequence[torch.Tensor], columns: int
) -> torch.Tensor:
    """Outputs of a forward pass, [tokens, columns] per pack, in the order of `local`, on the host. Collective."""
    layout = state.layout
    outputs = torch.zeros(local.num_tokens, columns, dtype=state.result_dtype, device=layout.device)
    if layout.is_last_stage and len(local):
        outputs = unpack_results(local, plan, layouts_of(packs), results, dp_rank=layout.dp_rank).to(outputs.dtype)
    if layout.pp_size > 1:
        last = dist.get_global_rank(layout.pp_group, layout.pp_size - 1)
        dist.broadcast(outputs, last, group=layout.pp_group)
    return outputs.cpu()


# ---- phases


Phase = Literal["plan", "pack", "forward_backward", "loss", "wait", "optimizer"]
PHASES: tuple[Phase, ...] = ("plan", "pack", "forward_backward", "loss", "wait", "optimizer")
"""Phases of a step. They do not overlap, except plan:

- plan: planning on the host since the last step; a background thread plans most steps while the one before trains;
- pack: checks, the consensus of all ranks, and packing as far as the schedule waits for it, on the host;
- forward_backward: the model, and the loss's backward;
- loss: from the model's output to the loss, with log-probs;
- wait: from the end of this rank's passes until gradients and loss are reduced over all ranks: the collectives, and
  the slower ranks;
- optimizer: gradient norm, update and learning-rate schedule.
"""


@dataclass(frozen=True)
class _Span:
    phase: Phase
    outer: Phase | None
    begin: Any
    end: Any


class _PhaseStack(threading.local):
    """The nested phases of a thread, the innermost last."""

    def __init__(self) -> None:
        self.phases: list[Phase] = []


class StepClock:
    """Times the phases of consecutive steps on `device`, in any thread."""

    def __init__(self, device: torch.device) -> None:
        self._on_device = device.type == "cuda"
        self._stack = _PhaseStack()
        self._spans: deque[_Span] = deque()  # a thread may add one while they are read

    @contextlib.contextmanager
    def phase(self, phase: Phase, *, on_host: bool = False) -> Iterator[None]:
        """Context timed as `phase`, and not as an outer one. `on_host`: it runs nothing on the device."""
        stack = self._stack.phases
        outer = stack[-1] if stack else None
        mark = time.perf_counter if on_host or not self._on_device else _event
        stack.append(phase)
        if self._on_device:
            torch.cuda.nvtx.range_push(phase)
        begin = mark()
        try:
            yield
        finally:
            self._spans.append(_Span(phase, outer, begin, mark()))
            if self._on_device:
                torch.cuda.nvtx.range_pop()
            stack.pop()

    def timed(self, phase: Phase, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, with its calls timed as `phase`."""

        def call(*arguments: Any, **options: Any) -> Any:
            with self.phase(phase):
                return function(*arguments, **options)

        return call

    def timing(self, phase: Phase, owner: Any, name: str) -> contextlib.AbstractContextManager[None]:
        """Context in which calls of the function `owner.name` are timed as `phase`."""
        function = getattr(owner, name)
        if function is None:  # without DDP there is no finalize_model_grads_func
            return contextlib.nullcontext()
        return _patched(owner, name, self.timed(phase, function))

    def discard(self) -> None:
        """Discards all times since the last reading."""
        self._spans.clear()

    @contextlib.contextmanager
    def attempt(self) -> Iterator[None]:
        """Context of a step: the times of one that fails are discarded."""
        try:
            yield
        except BaseException:
            self.discard()
            raise

    def read(self) -> dict[Phase, float]:
        """Seconds of every phase since the last reading. Call it when the device has finished them."""
        seconds: dict[Phase, float] = dict.fromkeys(PHASES, 0.0)
        while self._spans:
            span = self._spans.popleft()
            if isinstance(span.begin, float):
                spent = span.end - span.begin
            else:
                spent = span.begin.elapsed_time(span.end) / 1000
            seconds[span.phase] += spent
            if span.outer is not None:
                seconds[span.outer] -= spent
        return seconds


@contextlib.contextmanager
def _patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _event() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
