"""Host time of a micro-batch outside the model: planning, packing, the schedule's wrapper, the loss.

    python benchmarks/bench_host_time.py             Qwen3-1.7B's 28 layers, 16 samples of 640 tokens in a pack
    python benchmarks/bench_host_time.py --json FILE

Layers are 16 channels wide and packs of the step have 48 tokens, so that kernels take little: what remains is the time
of Python and of launching. Our part is the difference of two slopes over the number of micro-batches: of `train_step`,
and of Megatron's schedule alone over the same packs, made before, with the sum of the output as its loss. Both have one
layer, as what we do outside the layers does not depend on their number, and noise of 28 hides it. Planning and packing
are measured at the real size. Times are processor time of one thread; the shares by function are from cProfile, which
makes Python slower. Copies to a GPU are not in it, and there a thread packs while the device computes.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs in a checkout that is not installed

from roll_batching.known_warnings import hide_known_warnings

hide_known_warnings()  # before Megatron is imported

import torch

from benchmarks.bench_pack import MASKS
from benchmarks.bench_step import QWEN3, WORKLOADS, decoder, worker_config
from benchmarks.table import Table
from roll_batching.distributed.parallel_layout import start_processes
from roll_batching.losses import PolicyLoss
from roll_batching.packing import StepPacks
from roll_batching.planning import Plan, PlanConstraints, plan_step
from roll_batching.samples import SampleBatch
from roll_batching.strategy import MegatronTrainStrategy

LAYERS, SAMPLES, LONG, SHORT = 28, 16, 640, 3
FEW, MANY, ROUNDS = 2, 22, 9
LIMIT = 1.5
"""Most milliseconds of a micro-batch outside the model."""
FUNCTIONS = (
    ("packing", "batch.py", "_make"),
    ("the loss's binding", "runner.py", "bind"),
    ("from output to loss", "runner.py", "loss_func"),
    ("watched gradients", "runner.py", "record_nonfinite"),
    ("micro-batch tracker", "fault_messages.py", "_record"),
    ("the head's backward", "vocab_parallel.py", "backward"),
    ("result of the step", "optimizer_step.py", "join_results"),
)


def batch_of(packs: int, length: int) -> SampleBatch:
    """Samples of `packs` packs, with the fields of a policy loss."""
    count = packs * SAMPLES
    lengths, g = torch.full((count,), length), torch.Generator().manual_seed(0)
    total = count * length
    fields: dict[str, Any] = {"input_ids": torch.randint(0, 64, (total,), generator=g)}
    fields |= {"response_mask": torch.rand(total, generator=g) < 0.8, "advantages": torch.randn(count, generator=g)}
    kinds = {"input_ids": "token", "response_mask": "token", "advantages": "sample"}
    for name in ("old_log_probs", "ref_log_probs"):
        fields[name], kinds[name] = -torch.rand(total, generator=g), "next_token"
    return SampleBatch(torch.arange(count), lengths, fields, kinds)


def plan_of(packs: int, batch: SampleBatch, constraints: PlanConstraints, cost: Any) -> Plan:
    bins = [np.arange(packs * SAMPLES).reshape(packs, SAMPLES).tolist()]
    return Plan.from_bins(bins, batch.lengths.numpy(), constraints, cost=cost)


class Steps:
    """A model of narrow layers; steps of it and of Megatron's schedule alone."""

    def __init__(self, layers: int = 1) -> None:
        start_processes()
        load = replace(
            WORKLOADS["tiny"],
            architecture=decoder(16, layers, 2, 1, 16, 64, **{**QWEN3, "kv_channels": 8}),
            longest=LONG,
        )
        self.strategy = MegatronTrainStrategy(worker_config(load, "packed"), seed=1)
        self.strategy.initialize()
        self.loss = PolicyLoss(clip_low=0.2, clip_high=0.28, kl_coef=0.05, kl_bound=None)
        self._made: dict[int, tuple[SampleBatch, Plan, list[Any]]] = {}

    def inputs(self, packs: int) -> tuple[SampleBatch, Plan, list[Any]]:
        if packs not in self._made:
            batch = batch_of(packs, SHORT)
            plan = plan_of(packs, batch, self.strategy.constraints(), self.strategy.cost)
            made = list(StepPacks(batch, plan, dp_rank=0, device=self.strategy.device, masks=MASKS))
            self._made[packs] = (batch, plan, made)
        return self._made[packs]

    def ours(self, packs: int) -> None:
        batch, plan, _ = self.inputs(packs)
        self.strategy.train_step(batch, plan, self.loss)

    def bare(self, packs: int) -> None:
        """Megatron's schedule over prepared packs."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        _, _, made = self.inputs(packs)

        def forward_step(iterator: Any, chunk: Any) -> Any:
            pack = next(iterator)
            positions = pack.params.positions[None]
            output = chunk(pack.input_ids, positions, None, packed_seq_params=pack.params)
            return output, lambda out: (out.float().sum(), torch.ones((), dtype=torch.int), {})

        self.strategy.zero_grad()
        get_forward_backward_func(1, None)(
            forward_step_func=forward_step, data_iterator=iter(made), model=self.strategy.chunks[0],
            num_microbatches=packs, seq_length=SAMPLES * SHORT, micro_batch_size=1, forward_only=False,
        )  # fmt: skip


def milliseconds(call: Callable[[], object], repeats: int = ROUNDS) -> float:
    """Shortest processor time of `call` after a first one."""
    call()
    taken = []
    for _ in range(repeats):
        started = time.process_time()
        call()
        taken.append(time.process_time() - started)
    return 1e3 * min(taken)


def slope(step: Callable[[int], None]) -> float:
    """Milliseconds of a further micro-batch."""
    return (milliseconds(lambda: step(MANY)) - milliseconds(lambda: step(FEW))) / (MANY - FEW)


def functions(steps: Steps) -> dict[str, float]:
    """Milliseconds of a further micro-batch in each of `FUNCTIONS` and what they call, under cProfile."""
    found: list[dict[str, float]] = []
    for packs in (FEW, MANY):
        profile = cProfile.Profile()
        profile.runcall(steps.ours, packs)
        stats = pstats.Stats(profile).stats  # type: ignore[attr-defined]
        times = {
            (Path(file).name, name): entry[3] for (file, _, name), entry in stats.items() if "roll_batching" in file
        }
        found.append({what: 1e3 * times.get((file, name), 0.0) for what, file, name in FUNCTIONS})
    return {what: (found[1][what] - found[0][what]) / (MANY - FEW) for what in found[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    steps = Steps()
    whole, model = slope(steps.ours), slope(steps.bare)
    layers = slope(Steps(LAYERS).bare)
    real = batch_of(MANY, LONG)
    constraints = PlanConstraints(dp_size=1, max_tokens=SAMPLES * LONG)
    lengths = np.random.default_rng(0).permutation(real.lengths.numpy() - np.arange(len(real)) % LONG // 2)
    plan = plan_of(MANY, real, constraints, steps.strategy.cost)
    tiny, tiny_plan, _ = steps.inputs(MANY)

    def pack(batch: SampleBatch, of: Plan) -> None:
        list(StepPacks(batch, of, dp_rank=0, device=torch.device("cpu"), masks=MASKS))

    figures = {
        "plan": milliseconds(lambda: plan_step(lengths, constraints)) / MANY,
        "pack": milliseconds(lambda: pack(real, plan)) / MANY,
        "schedule and loss": whole - model - milliseconds(lambda: pack(tiny, tiny_plan)) / MANY,
    }
    total = sum(figures.values())
    table = Table(f"Milliseconds of a micro-batch, {LAYERS} layers, {SAMPLES} samples", ["part", "ms"])
    for name, value in figures.items():
        table.add(name, f"{value:.2f}")
    table.add("**ours**", f"**{total:.2f}**")
    table.add("Megatron's and torch's layers", f"{layers:.2f}")
    for name, value in (shares := functions(steps)).items():
        table.add(f"under cProfile: {name}", f"{value:.2f}")
    table.require(total <= LIMIT, f"our part {total:.2f} ms, at most {LIMIT}")
    table.show()
    if args.json is not None:
        args.json.write_text(json.dumps({**figures, "layers": layers, "profiled": shares}, indent=1) + "\n")


if __name__ == "__main__":
    main()
