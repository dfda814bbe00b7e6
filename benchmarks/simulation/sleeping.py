"""Training steps of real processes whose passes sleep: Megatron's schedules at a pace that is known beforehand."""

from __future__ import annotations

import itertools
import os
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

ARCHITECTURE = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "ffn_hidden_size": 16,
    "max_position_embeddings": 64,
}
TOKENS = 32
"""Tokens of a pack: computing takes little beside sleeping. A slice has one at least."""
MOST_TRANSFERS = 1024
"""Most transfers between two stages in one direction, of a step."""


@dataclass(frozen=True, kw_only=True)
class SleepingPlan:
    """Micro-batches of an optimizer step, and how long their passes sleep."""

    packs: tuple[tuple[int, ...], ...]
    """Numbers of the packs of each data-parallel rank, in order; ranks that share a pack compute it together."""
    forward: tuple[float, ...]
    """Seconds of the forward pass of each pack on a stage, or of each slice; backward takes twice as long."""
    slices: tuple[int, ...] | None = None
    """Slices of each pack; None: packs are computed as a whole."""
    delay: float = 0.0
    """Seconds of a transfer between stages, in a pipeline of one data-parallel rank."""


@dataclass(frozen=True, kw_only=True)
class SleepingJob:
    """A job of real processes that trains one step for each plan."""

    plans: tuple[SleepingPlan, ...]
    stages: int = 1
    chunks: int = 1
    max_cp_size: int = 1
    repeats: int = 1
    """Timed steps of each plan, in turn."""

    @property
    def ranks(self) -> int:
        """Data-parallel ranks."""
        return len(self.plans[0].packs)

    @property
    def processes(self) -> int:
        """Processes of the job."""
        return self.stages * self.ranks


def train(job: SleepingJob) -> dict[str, Any]:
    """Runs on each rank. Returns, by plan and repeat, its passes (backward, micro-batch, chunk, start, end) and the
    transfers of its calls.
    """
    import torch
    import torch.distributed as dist

    from roll_batching.losses import SFTLoss
    from roll_batching.strategy import MegatronTrainStrategy

    torch.set_num_threads(1)
    strategy = MegatronTrainStrategy(_role(job), seed=1)
    strategy.initialize()
    home = strategy.layout.dp_rank
    links = _DelayedLinks(strategy.layout.pp_rank) if any(one.delay for one in job.plans) else None
    log = _Log(len(strategy.chunks), links)
    for number, chunk in enumerate(strategy.chunks):
        log.watch(number, chunk)
    steps = [_Step.of(strategy, sleeping) for sleeping in job.plans]
    transfers = []
    for step in steps:  # without sleep: what runs once is not timed
        log.start(None)
        strategy.train_step(step.batch, step.plan, SFTLoss())
        transfers.append(log.transfers)
    timed: list[list[Any]] = [[] for _ in steps]
    for _, (step, passes) in itertools.product(range(job.repeats), zip(steps, timed, strict=True)):
        log.start(step.forward, step.delay)
        dist.barrier()
        strategy.train_step(step.batch, step.plan, SFTLoss())
        passes.append(log.passes)
    return {"dp_rank": home, "stage": strategy.layout.pp_rank, "steps": timed, "transfers": transfers}


@dataclass(frozen=True)
class _Step:
    """A plan on one rank: its samples, and the seconds of its forward passes."""

    plan: Any
    batch: Any
    forward: list[float]
    delay: float

    @classmethod
    def of(cls, strategy: Any, sleeping: SleepingPlan) -> _Step:
        import torch

        from roll_batching.planning import Plan
        from roll_batching.planning.plan_arrays import PackSlices
        from roll_batching.samples import SampleBatch

        counts = np.array(sleeping.slices or [1] * len(sleeping.forward))
        lengths = torch.full((len(counts),), TOKENS)
        fields = {
            "input_ids": torch.ones(int(lengths.sum()), dtype=torch.long),
            "response_mask": torch.ones(int(lengths.sum()), dtype=torch.bool),
        }
        batch = SampleBatch(torch.arange(len(lengths)), lengths, fields, dict.fromkeys(fields, "token"))
        bins = [[[pack] for pack in packs] for packs in sleeping.packs]
        plan = Plan.from_bins(bins, lengths.numpy(), strategy.constraints())
        home, of_packs = strategy.layout.dp_rank, np.split(np.array(sleeping.forward), np.cumsum(counts)[:-1])
        if sleeping.slices is not None:  # with equal tokens: what a pass takes is its sleep
            cuts = [TOKENS * np.arange(1, count) // count for count in counts]
            offsets = np.cumsum([0, *map(len, cuts)])
            plan = replace(plan, slices=PackSlices(offsets, np.concatenate(cuts), np.ones(counts.sum(), np.int64)))
        forward = [float(seconds) for pack in sleeping.packs[home] for seconds in of_packs[pack]]
        return cls(plan, plan.shard(batch, home), forward, sleeping.delay)


def step_seconds(results: list[dict[str, Any]]) -> list[float]:
    """Shortest step of each plan, from the first pass of any rank to the end of the last: noise only adds."""
    seconds = []
    for of_plan in zip(*(result["steps"] for result in results), strict=True):
        spans = []
        for of_ranks in zip(*of_plan, strict=True):
            every = [one for passes in of_ranks for one in passes]
            spans.append(max(one[4] for one in every) - min(one[3] for one in every))
        seconds.append(min(spans))
    return seconds


def _role(job: SleepingJob) -> Any:
    from roll_batching.jobs.config import WorkerConfig

    layout: dict[str, Any] = {"pipeline_model_parallel_size": job.stages}
    if job.chunks > 1:
        layout["virtual_pipeline_model_parallel_size"] = job.chunks
    if job.max_cp_size > 1:
        layout |= {"context_parallel_size": "auto", "max_context_parallel_size": job.max_cp_size}
    return WorkerConfig.model_validate(
        {
            "model_args": {"architecture": {**ARCHITECTURE, "num_layers": job.stages * job.chunks}},
            "strategy_args": {"strategy_name": "megatron_train", "strategy_config": layout},
            "use_sequence_packing": True,
            "sequence_packing_args": {"max_packed_sequence_length_train": TOKENS},
        }
    )


class _Log:
    """Passes and transfers of one rank, and the sleep inside its passes."""

    def __init__(self, chunks: int, links: _DelayedLinks | None) -> None:
        self.chunks, self.links = chunks, links
        self._record_transfers()
        self.start(None)

    def start(self, forward: list[float] | None, delay: float = 0.0) -> None:
        """Begin a step with these seconds of its forward passes and transfers; None: without sleep."""
        self.forward = forward
        if self.links is not None:
            self.links.start(delay)
        self.passes: list[tuple[bool, int, int, float, float]] = []
        self.transfers: list[tuple[bool, bool, bool, bool]] = []
        self.counts = [0] * self.chunks  # forward passes so far: a chunk computes micro-batches in their order

    def watch(self, number: int, chunk: Any) -> None:
        """Let the passes of a chunk sleep."""
        began = 0.0

        def before(*_: Any) -> None:
            nonlocal began
            began = time.monotonic()

        def after(_: Any, __: Any, output: Any) -> None:
            index = self.counts[number]
            self.counts[number] += 1
            self._sleep(False, index, number, began)
            output.register_hook(lambda _: self._sleep(True, index, number, time.monotonic()))

        chunk.register_forward_pre_hook(before)
        chunk.register_forward_hook(after)

    def _sleep(self, is_backward: bool, index: int, chunk: int, began: float) -> None:
        if self.forward is not None:
            seconds = self.forward[index] / self.chunks * (2 if is_backward else 1)
            # Computing before the sleep counts as part of the pass.
            time.sleep(max(0.0, seconds - (time.monotonic() - began)))
        self.passes.append((is_backward, index, chunk, began, time.monotonic()))

    def _record_transfers(self) -> None:
        """Record what each call of Megatron's communicator sends and receives."""
        from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

        communicate = P2PCommunicator._communicate

        def recorded(communicator: Any, **call: Any) -> Any:
            made = (
                call["tensor_send_next"] is not None,
                call["tensor_send_prev"] is not None,
                bool(call["recv_prev"]),
                bool(call["recv_next"]),
            )
            if any(made):
                self.transfers.append(made)
            if self.links is None:
                return communicate(communicator, **call)
            return self.links.delayed(made, lambda: communicate(communicator, **call))

        P2PCommunicator._communicate = recorded


class _DelayedLinks:
    """Transfers between neighbouring stages that end `delay` seconds after both sides have called for them.

    Sides note the times of their calls in a file that all processes of the job map: they have one clock.
    """

    def __init__(self, stage: int) -> None:
        import torch.distributed as dist

        self.stage, self.delay = stage, 0.0
        file = Path(os.environ["RANKS_FOLDER"]) / "calls"
        shape = 2, 2, dist.get_world_size(), MOST_TRANSFERS
        if dist.get_rank() == 0:
            np.zeros(shape).tofile(file)
        dist.barrier()
        self.calls: Any = np.memmap(file, np.float64, "r+", shape=shape)
        """Time of each call, [whether receiving, whether backward, sending stage, number]."""
        self.numbers: Counter[tuple[int, int, int]] = Counter()
        self._delay_slices()

    def start(self, delay: float) -> None:
        """Begin a step whose transfers take `delay` seconds."""
        self.delay = delay
        self.numbers.clear()

    def note(self, is_receiving: int, is_backward: int, sender: int) -> Any:
        """The calls of both sides of the next transfer, float64[2], after noting this side's."""
        channel = is_receiving, is_backward, sender
        number = self.numbers[channel]
        self.numbers[channel] += 1
        both = self.calls[:, is_backward, sender, number]
        both[is_receiving] = time.monotonic()
        return both

    def delayed(self, made: tuple[bool, bool, bool, bool], call: Any) -> Any:
        """The result of a call of Megatron's communicator, which waits for both sides of all its transfers."""
        sides = ((0, 0, self.stage), (0, 1, self.stage), (1, 0, self.stage - 1), (1, 1, self.stage + 1))
        notes = [self.note(*side) for side, is_made in zip(sides, made, strict=True) if is_made]
        result = call()
        self._sleep_until(max((float(both.max()) for both in notes), default=0.0) + self.delay)
        return result

    def _sleep_until(self, end: float) -> None:
        if self.delay:
            time.sleep(max(0.0, end - time.monotonic()))

    def _delay_slices(self) -> None:
        """Slices: receives are posted ahead, and a transfer begins when the sender calls."""
        from roll_batching.strategy.sliced_schedule import _Transfers

        send, receive = _Transfers._send, _Transfers._receive

        def noted_send(transfers: Any, direction: int, number: int, tensor: Any) -> None:
            self.note(0, direction, self.stage)
            send(transfers, direction, number, tensor)

        def delayed_receive(transfers: Any, direction: int, number: int) -> Any:
            both = self.note(1, direction, self.stage + (1 if direction else -1))
            result = receive(transfers, direction, number)
            self._sleep_until(float(both[0]) + self.delay)
            return result

        _Transfers._send, _Transfers._receive = noted_send, delayed_receive  # type: ignore[method-assign]
