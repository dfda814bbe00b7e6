"""Training steps of real processes that compute: bytes that a stage keeps for backward passes, and time of each pass.

Seconds are processor time of the thread that computes: it does not wait, and shares its cores without harm. Played back
in the order of the schedule, they say how long stages wait for each other where each has a device.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from roll_batching.planning import Plan, PlanConstraints, plan_step
from roll_batching.planning.pipeline.schedule import Pass, dependency_of
from roll_batching.settings import ArchitectureConfig
from roll_batching.settings.model_cost import architecture_cost

TimedPass = tuple[Pass, float]
"""A pass and its processor time in seconds."""


@dataclass(frozen=True, kw_only=True)
class ComputingJob:
    """A job of one data-parallel rank that trains the same samples by several plans."""

    architecture: Mapping[str, Any]
    lengths: np.ndarray
    """int64[samples]"""
    cap: int
    stages: int
    slices: int
    """Slices of a pack of mean cost, of the last plan."""
    repeats: int = 2
    """Timed steps of each plan; the shortest time of each pass counts."""

    @property
    def constraints(self) -> PlanConstraints:
        """Constraints of whole packs."""
        return PlanConstraints(dp_size=1, pp_size=self.stages, max_tokens=self.cap)

    def plans(self) -> dict[str, Plan]:
        """Plans by name: packs for the schedule of whole packs, the fewest packs, and slices."""
        constraints, cost = self.constraints, architecture_cost(ArchitectureConfig.model_validate(self.architecture))
        few = plan_step(self.lengths, replace(constraints, pp_size=1), cost=cost)
        bins = [[mb.samples.tolist() for mb in of_rank] for of_rank in few.micro_batches]
        return {
            "whole packs": plan_step(self.lengths, constraints, cost=cost),
            "fewest whole packs": Plan.from_bins(bins, self.lengths, constraints, cost=cost),
            "slices": plan_step(self.lengths, replace(constraints, pipeline_slices=self.slices), cost=cost),
        }


def train(job: ComputingJob) -> dict[str, Any]:
    """Runs on each rank. Returns by plan its most bytes and the passes of its stage."""
    import torch

    from roll_batching.losses import SFTLoss
    from roll_batching.samples import SampleBatch
    from roll_batching.strategy import MegatronTrainStrategy

    torch.set_num_threads(1)
    strategy = MegatronTrainStrategy(_role(job), seed=1)
    strategy.initialize()
    lengths, draw = torch.from_numpy(job.lengths), torch.Generator().manual_seed(1)
    count = int(lengths.sum())
    fields = {
        "input_ids": torch.randint(job.architecture["vocab_size"], (count,), generator=draw),
        "response_mask": torch.ones(count, dtype=torch.bool),
    }
    batch = SampleBatch(torch.arange(len(lengths)), lengths, fields, dict.fromkeys(fields, "token"))
    clock, results = _PassClock(), {}
    for name, plan in job.plans().items():
        alive, placed = AliveBytes(strategy.chunks[0].parameters()), plan.shard(batch, 0)
        with alive.counting():
            strategy.train_step(placed, plan, SFTLoss())
        steps = []
        for _ in range(job.repeats):
            clock.passes = []
            strategy.train_step(placed, plan, SFTLoss())
            steps.append(clock.passes)
        passes = [(one[0][0], min(seconds for _, seconds in one)) for one in zip(*steps, strict=True)]
        results[name] = {"bytes": alive.most, "left": alive.bytes, "passes": passes}
    return results


def replay(lanes: Sequence[Sequence[TimedPass]]) -> float:
    """Seconds of a step whose passes take these times on each stage, each stage on a device, with free transfers."""
    stages, ends = len(lanes), dict[tuple[Pass, int], float]()
    clocks, places = [0.0] * stages, [0] * stages
    while any(place < len(lane) for place, lane in zip(places, lanes, strict=True)):
        for stage, lane in enumerate(lanes):
            while places[stage] < len(lane):
                operation, seconds = lane[places[stage]]
                source = dependency_of(operation, stage, stages, 1)
                if source is not None and source not in ends:
                    break
                begin = clocks[stage] if source is None else max(clocks[stage], ends[source])
                clocks[stage] = ends[operation, stage] = begin + seconds
                places[stage] += 1
    return max(clocks)


def bubble_share(lanes: Sequence[Sequence[TimedPass]]) -> float:
    """Share of a replayed step in which stages wait, mean of the stages."""
    busy = sum(seconds for lane in lanes for _, seconds in lane)
    return 1 - busy / len(lanes) / replay(lanes)


def _role(job: ComputingJob) -> Any:
    from roll_batching.jobs.config import WorkerConfig

    architecture = {**job.architecture, "max_position_embeddings": job.cap}
    return WorkerConfig.model_validate(
        {
            "model_args": {"architecture": architecture},
            "strategy_args": {
                "strategy_name": "megatron_train",
                "strategy_config": {"pipeline_model_parallel_size": job.stages},
            },
            "use_sequence_packing": True,
            "sequence_packing_args": {"max_packed_sequence_length_train": job.cap},
        }
    )


class _PassClock:
    """Processor time of each pass of this stage, in Megatron's schedule of whole packs and in that of slices."""

    def __init__(self) -> None:
        from megatron.core.pipeline_parallel import schedules

        from roll_batching.strategy.sliced_schedule import SlicedSchedule

        self.passes: list[TimedPass] = []
        for name, kind in (("forward_step", "F"), ("backward_step", "B")):
            setattr(schedules, name, self._of_pack(getattr(schedules, name), kind))
        for name, kind in (("_forward", "F"), ("_backward", "B")):
            setattr(SlicedSchedule, name, self._of_slice(getattr(SlicedSchedule, name), kind))

    def _of_pack(self, function: Any, kind: Any) -> Any:
        def timed(*arguments: Any, **options: Any) -> Any:
            number = sum(operation.kind == kind for operation, _ in self.passes)  # first in, first out
            begin = time.thread_time()
            result = function(*arguments, **options)
            self.passes.append((Pass(kind, number, 0), time.thread_time() - begin))
            return result

        return timed

    def _of_slice(self, function: Any, kind: Any) -> Any:
        def timed(schedule: Any, number: int, **options: Any) -> None:
            begin = time.thread_time()
            function(schedule, number, **options)
            self.passes.append((Pass(kind, number, 0), time.thread_time() - begin))

        return timed


class AliveBytes:
    """Bytes of the distinct storages that autograd saves, and of kept keys and their gradients; parameters are none."""

    def __init__(self, parameters: Any) -> None:
        self._excluded = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        self._holders: Counter[int] = Counter()
        self.bytes = self.most = 0

    def counting(self) -> Any:
        """Context in which passes are counted; one instance is used once, and the last one made counts kept keys."""
        import torch

        from roll_batching.modeling.attention.kept import KeptKeys

        write, add = _unwrapped(KeptKeys.write), _unwrapped(KeptKeys.add_gradients)

        def counted_write(kept: Any, layer: int, *rest: Any) -> Any:
            result = write(kept, layer, *rest)
            held = kept.__dict__.setdefault("held", {})
            if (0, layer) not in held:
                held[0, layer] = [_Held(self, buffer) for buffer in kept._kept[layer]]
            return result

        def counted_add(kept: Any, layer: int, *rest: Any) -> Any:
            result = add(kept, layer, *rest)
            if layer not in kept._kept:  # the pack's first slice: both are released
                kept.held.pop((0, layer)), kept.held.pop((1, layer), None)
            elif (1, layer) not in kept.held:
                kept.held[1, layer] = [_Held(self, buffer) for buffer in kept._gradients[layer]]
            return result

        counted_write.counts, counted_add.counts = write, add  # type: ignore[attr-defined]
        KeptKeys.write, KeptKeys.add_gradients = counted_write, counted_add  # type: ignore[method-assign]
        return torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: _Held(self, tensor.detach()), lambda held: held.tensor
        )

    def hold(self, key: int, size: int) -> None:
        """One more holder of a storage."""
        if key in self._excluded:
            return
        self._holders[key] += 1
        if self._holders[key] == 1:
            self.bytes += size
            self.most = max(self.most, self.bytes)

    def release(self, key: int, size: int) -> None:
        """One holder less."""
        if key in self._excluded:
            return
        self._holders[key] -= 1
        if self._holders[key] == 0:
            self.bytes -= size


def _unwrapped(function: Any) -> Any:
    return getattr(function, "counts", function)


class _Held:
    """A tensor that is kept for a backward pass, counted while it is referenced."""

    def __init__(self, count: AliveBytes, tensor: Any) -> None:
        storage = tensor.untyped_storage()
        self.count, self.tensor, self.key, self.size = count, tensor, storage.data_ptr(), storage.nbytes()
        count.hold(self.key, self.size)

    def __del__(self) -> None:
        self.count.release(self.key, self.size)
