"""Steps with a context-parallel size per pack on eight processes: measured times beside predicted ones.

    python benchmarks/bench_cp_steps.py                three draws of lengths with a heavy tail
    python benchmarks/bench_cp_steps.py --draws 1 --json cp_steps.json

Real Megatron steps over gloo, with a small model. A machine with a few cores cannot compute eight ranks at once, so
each pack sleeps for its predicted time (a third in the forward pass, two thirds in the backward). Measured is what
ranks wait for (blocks of ranks, gathers of keys and values, the reduction of gradients), not what a pack costs.
Predicted times are those of an 8B model on H100s, with lengths a 64th of the real ones and times stretched to
seconds. The time of a step is that of its slowest rank, from a barrier on, minimum of the rounds. `--check` exits 1
if a ratio of two measured times differs from the predicted one by more than 10%, or a step with sizes per pack is
slower than the best single size.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import time
from dataclasses import dataclass, replace
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs in a checkout that is not installed

from roll_batching.known_warnings import hide_known_warnings

hide_known_warnings()  # before Megatron is imported

from benchmarks.bench_step import decoder
from benchmarks.dynamic_cp.settings import COMMON, SHAPES
from benchmarks.table import Table
from roll_batching.planning import FlopsCost, Plan, PlanConstraints, plan_step
from roll_batching.planning.cost_model import DEFAULT_COST
from roll_batching.planning.dynamic_cp.choices import SizeChoices
from roll_batching.planning.dynamic_cp.planner import plan_fixed
from roll_batching.planning.pack_times import Cluster, PackTimes
from roll_batching.planning.problem import build_problem

RANKS, SAMPLES, SCALE = 8, 96, 64
LONGEST, CAP = 65536 // SCALE, 16384 // SCALE
STEP_SECONDS = 6.0
"""Predicted time of a step with the best single size, once stretched: far above what the small model computes."""
TOLERANCE = 0.10


@dataclass(frozen=True)
class Draw:
    """Lengths of a step, and its plans by name with their predicted seconds."""

    lengths: np.ndarray
    """int64 [SAMPLES]; the data of sample i lie on rank i % RANKS."""
    plans: dict[str, Plan]
    predicted: dict[str, float]
    times: PackTimes


def lengths_of(seed: int) -> np.ndarray:
    """Lengths with a heavy tail, int64 [SAMPLES], a `SCALE`th of the real ones."""
    lengths = np.random.default_rng(seed).lognormal(np.log(1500), 1.6, SAMPLES).clip(64, LONGEST * SCALE)
    lengths[0] = LONGEST * SCALE  # the sequence that a single size must hold
    return (lengths // SCALE).astype(np.int64)


def stretched(slower: float) -> PackTimes:
    """Times of the 8B model for lengths a `SCALE`th of the real ones, `slower` times as long."""
    shape, h100 = SHAPES["8B"], Cluster()
    cost = FlopsCost.from_model(**shape, **COMMON)
    cluster = replace(
        h100,
        matmul_rate=h100.matmul_rate / slower,
        attention_rate=h100.attention_rate / slower,
        node_bandwidth=h100.node_bandwidth / slower,
        node_latency=h100.node_latency * slower,
        layer_floor=h100.layer_floor * slower,
        matmul_half_tokens=h100.matmul_half_tokens / SCALE,
        attention_tile=h100.attention_tile // SCALE,
    )
    times = PackTimes.of_model(
        cost,
        num_layers=shape["num_layers"],
        hidden_size=shape["hidden_size"] * SCALE,
        num_query_groups=COMMON["num_query_groups"] * SCALE,
        kv_channels=COMMON["kv_channels"],
        cluster=cluster,
    )
    return replace(times, linear=times.linear * SCALE, quadratic=times.quadratic * SCALE**2)


def draw(seed: int) -> Draw:
    """Plans of one draw: every single size that holds the longest sequence, and a size per pack."""
    lengths = lengths_of(seed)
    constraints = PlanConstraints(dp_size=RANKS, max_tokens=CAP, max_cp_size=RANKS)
    fixed = plan_step(lengths, constraints, times=stretched(1.0)).report.fixed_seconds
    assert fixed is not None
    times = stretched(STEP_SECONDS / fixed)
    location = np.arange(SAMPLES) % RANKS
    problem = build_problem(lengths, constraints, cost=DEFAULT_COST)
    choices = SizeChoices.of(problem, times)
    plans, predicted = {}, {}
    for level, size in enumerate(choices.sizes.tolist()):
        if not choices.fits[level].all():
            continue
        packs = plan_fixed(problem, choices, level)
        bins: list[list[list[int]]] = [[] for _ in range(RANKS)]
        for members, first in zip(packs.units, packs.first_ranks, strict=True):
            for rank in range(first, first + size):
                bins[rank].append(members)
        plans[f"size {size}"] = Plan.from_bins(bins, lengths, constraints, location=location)
        predicted[f"size {size}"] = packs.step_time / 1e9
    plan = plan_step(lengths, constraints, times=times, location=location)
    plans["per pack"], predicted["per pack"] = plan, plan.report.predicted_seconds or 0.0
    return Draw(lengths, plans, predicted, times)


class SleepingDecoder:
    """Makes the decoder of a model sleep for the predicted time of each pack of a plan, in order."""

    def __init__(self, decoder_block: torch.nn.Module) -> None:
        self.seconds: list[float] = []
        self.next = 0
        decoder_block.register_forward_hook(self._forward)

    def expect(self, plan: Plan, times: PackTimes, rank: int) -> None:
        """Take the packs of `rank` as those of the next step."""
        self.seconds = [times.pack(mb.lengths, mb.cp_size) / 1e9 for mb in plan.micro_batches[rank]]
        self.next = 0

    def _forward(self, module: torch.nn.Module, args: Any, hidden: torch.Tensor) -> torch.Tensor:
        seconds = self.seconds[self.next]
        self.next += 1
        time.sleep(seconds / 3)
        hidden.register_hook(lambda _: time.sleep(seconds * 2 / 3))
        return hidden


def make_strategy() -> Any:
    """A strategy whose model is small enough to cost little beside the sleep."""
    from roll_batching.jobs.config import WorkerConfig
    from roll_batching.strategy import MegatronTrainStrategy

    shape = {**decoder(32, 1, 4, 4, 64, 64), "vocab_size": 64, "max_position_embeddings": LONGEST}
    config = {
        "model_args": {"architecture": shape},
        "training_args": {"learning_rate": 1e-5},
        "strategy_args": {"strategy_name": "megatron_train", "strategy_config": {"context_parallel_size": "auto"}},
        "use_sequence_packing": True,
        "sequence_packing_args": {"max_packed_sequence_length_train": CAP},
    }
    strategy = MegatronTrainStrategy(WorkerConfig.model_validate(config), seed=1)
    strategy.initialize()
    return strategy


def run_rank(rank: int, port: int, draws: int, rounds: int, results: SimpleQueue[list[dict[str, float]]]) -> None:
    """Measure all plans in turn, on one rank; rank 0 puts the seconds by draw and plan into `results`."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    from megatron.core.utils import get_attr_wrapped_model

    from roll_batching.losses import SFTLoss
    from roll_batching.samples import SampleBatch, distribute

    strategy, loss = make_strategy(), SFTLoss()
    sleeping = SleepingDecoder(get_attr_wrapped_model(strategy.chunks[0], "decoder"))
    measured = []
    for seed in range(draws):
        case, generator = draw(seed), torch.Generator().manual_seed(seed)
        ids = [torch.randint(64, (length,), generator=generator) for length in case.lengths.tolist()]
        masks = [torch.ones(len(row), dtype=torch.bool) for row in ids]
        fields = {"input_ids": ids, "response_mask": masks}
        whole = SampleBatch.from_lists(fields, dict.fromkeys(fields, "token"))
        local = whole.select(torch.arange(rank, SAMPLES, RANKS))
        best = dict.fromkeys(case.plans, float("inf"))
        for _ in range(rounds):
            for name, plan in case.plans.items():
                placed = distribute(local, plan)
                sleeping.expect(plan, case.times, rank)
                dist.barrier()
                start = time.perf_counter()
                strategy.train_step(placed, plan, loss)
                dist.barrier()
                best[name] = min(best[name], time.perf_counter() - start)
        measured.append(best)
    if rank == 0:
        results.put(measured)
    dist.barrier()
    dist.destroy_process_group()


def free_port() -> int:
    """A port that no program listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def show(measured: list[dict[str, float]]) -> Table:
    """Table of measured and predicted seconds, with the limits of `--check`."""
    table = Table(
        f"{SAMPLES} sequences on {RANKS} ranks: seconds of a step whose packs sleep for their predicted time",
        ("draw", "plan", "micro-batches by rank", "predicted", "measured", "over best single: predicted", "measured"),
    )
    for seed, seconds in enumerate(measured):
        case = draw(seed)
        singles = [name for name in case.plans if name != "per pack"]
        best = min(singles, key=lambda name: case.predicted[name])
        for name, plan in case.plans.items():
            expected = case.predicted[name] / case.predicted[best]
            ratio = seconds[name] / seconds[best]
            counts = sorted({len(packs) for packs in plan.micro_batches})
            shown = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])
            figures = (case.predicted[name], seconds[name], expected, ratio)
            table.add(seed, name, shown, *(f"{value:.2f}" for value in figures))
            off = abs(ratio / expected - 1)
            table.require(off <= TOLERANCE, f"draw {seed}, {name}: ratio {ratio:.3f}, predicted {expected:.3f}")
        gain = seconds["per pack"] / seconds[best]
        table.require(gain <= 1, f"draw {seed}: sizes per pack take {gain:.3f} of the best single size")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--draws", type=int, default=3, help="random draws of lengths")
    parser.add_argument("--rounds", type=int, default=3, help="steps of each plan")
    parser.add_argument("--json", type=Path, help="write the seconds there")
    parser.add_argument("--check", action="store_true", help="exit 1 if a limit does not hold")
    given = parser.parse_args()
    results = torch.multiprocessing.get_context("spawn").SimpleQueue()
    torch.multiprocessing.spawn(run_rank, (free_port(), given.draws, given.rounds, results), nprocs=RANKS)
    measured = results.get()
    table = show(measured)
    table.show()
    if given.json:
        predicted = [draw(seed).predicted for seed in range(given.draws)]
        given.json.write_text(json.dumps({"measured": measured, "predicted": predicted}, indent=1) + "\n")
    if given.check and table.missed:
        sys.exit(1)


if __name__ == "__main__":
    main()
