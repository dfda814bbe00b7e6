"""Micro-batches of verl, NeMo-RL, slime and ROLL, beside the same functions with our planner behind them.

    python scripts/bench_hosts.py --slime SLIME --nemo-rl NEMO_RL --roll ROLL      checkouts; each host alone will do
    python scripts/bench_hosts.py --verl                                           the verl that is installed
    ... --check                                                                    and 200 random cases of each

The hosts' own functions form the batches, and their own formula gives the cost of a sample. A row has micro-batches per
rank (K), cost of the slowest rank / mean, sum over k of the costliest k-th micro-batch / mean (lockstep: ranks that
meet at every micro-batch), micro-batches above the cap, and seconds. `--check` exits 1 where ours is behind in one of
them. A host above the cap is not compared in K and lockstep, and lockstep counts the fixed cost of each micro-batch:
more of them are easier to level.

Hosts whose ranks meet in an all-reduce for K run rank by rank here, with K given as their minimum.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs in a checkout that is not installed

from benchmarks import stand_ins
from roll_batching.planning.cost_model import FIXED_TOKENS

Lengths = NDArray[np.int64]
Bins = list[list[list[int]]]
"""Samples by rank and micro-batch."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One optimizer step."""

    lengths: Lengths
    ranks: int
    cap: int
    multiple: int = 1
    """K is a multiple of this: interleaved pipelines."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What a host's batches come to."""

    count: int
    slowest: float
    lockstep: float
    above_cap: int
    """Micro-batches of several samples above the cap."""
    fixed: float = 0.0
    """Fixed cost of a micro-batch / mean cost of a rank."""

    @property
    def step(self) -> float:
        """Lockstep with the fixed cost of each micro-batch."""
        return self.lockstep + self.fixed * self.count

    def behind(self, host: Figures) -> list[str]:
        """Names of the figures in which this is behind `host`, to rounding."""
        worse = {
            "K": self.count > host.count and not host.above_cap,
            "slowest rank": self.slowest > host.slowest + 5e-4,
            "lockstep": self.step > host.step + 5e-4 and not host.above_cap,
            "cap": self.above_cap > 0,
        }
        return [name for name, is_worse in worse.items() if is_worse]


class Host:
    """A host's function that forms batches, with the cost that it balances by."""

    name = ""
    ways: tuple[str, ...] = ("own",)

    def cost(self, lengths: Lengths) -> NDArray[np.float64]:
        """verl's and ROLL's `calculate_workload`."""
        return 24576.0 * lengths + lengths.astype(np.float64) ** 2

    def fixed_cost(self) -> float:
        """Cost of a micro-batch beside its samples: the planner's number of short tokens."""
        return float(self.cost(np.array([1]))[0] * FIXED_TOKENS)

    def tokens(self, lengths: Lengths) -> Lengths:
        """What counts towards the cap."""
        return lengths

    def bins(self, case: Case, way: str) -> Bins:
        """The host's own batches in one of its `ways`, or `ours`."""
        raise NotImplementedError


def figures(host: Host, case: Case, bins: Bins) -> Figures:
    """The figures of one step's batches. Raises AssertionError unless each sample is in one of them."""
    placed = sorted(sample for of_rank in bins for one in of_rank for sample in one)
    assert placed == list(range(len(case.lengths))) and len({len(of_rank) for of_rank in bins}) == 1
    cost, tokens = host.cost(case.lengths), host.tokens(case.lengths)
    table = np.array([[cost[one].sum() for one in of_rank] for of_rank in bins])
    mean = table.sum() / case.ranks
    full = [tokens[one].sum() > case.cap and len(one) > 1 for of_rank in bins for one in of_rank]
    return Figures(
        count=table.shape[1],
        slowest=float(table.sum(axis=1).max() / mean),
        lockstep=float(table.max(axis=0).sum() / mean),
        above_cap=int(sum(full)),
        fixed=float(host.fixed_cost() / mean),
    )


def dealt(parts: list[list[int]], of_rank: Bins) -> Bins:
    """Indices into each rank's part as indices into all samples."""
    return [[[part[i] for i in one] for one in bins] for part, bins in zip(parts, of_rank, strict=True)]


class Verl(Host):
    """`_balance_batch` over ranks by equal numbers of samples, then `rearrange_micro_batches` on each."""

    name = "verl"

    def __init__(self) -> None:
        import verl.utils.seqlen_balancing as module

        self._own = (module.rearrange_micro_batches, module.get_seqlen_balanced_partitions)
        import roll_batching.integrations.verl as ours

        ours.unpatch()
        self._ours = ours

    def bins(self, case: Case, way: str) -> Bins:
        rearrange, partition = self._own
        work = self.cost(case.lengths).astype(np.int64).tolist()
        if way == "ours":
            parts = self._ours.get_seqlen_balanced_partitions(work, case.ranks, True)
            lengths = [case.lengths[part] for part in parts]
            return dealt(parts, self._ours.plan_bins(lengths, case.cap, multiple=case.multiple))
        parts = partition(work, case.ranks, True)

        def of_each(least: int | None) -> Bins:
            batches = [self._batch(case.lengths[part]) for part in parts]
            divided = {"num_batches_divided_by": case.multiple if case.multiple > 1 else None}
            return [rearrange(one, case.cap, min_num_micro_batch=least, **divided)[1] for one in batches]

        least = max(len(one) for one in of_each(None))
        for _ in range(50):  # 0.9.1 raises K until the cap holds, in the all-reduce that every rank takes part in
            bins = of_each(least)
            if len({len(one) for one in bins}) == 1:
                return dealt(parts, bins)
            least = max(len(one) for one in bins)
        raise AssertionError("verl's ranks do not agree on K")

    def _batch(self, lengths: Lengths) -> Any:
        import torch
        from tensordict import TensorDict

        rows = [torch.zeros(int(length), dtype=torch.long) for length in lengths]
        return TensorDict({"input_ids": torch.nested.as_nested_tensor(rows, layout=torch.jagged)}, [len(rows)])


class NemoRL(Host):
    """`get_packer(...).pack`, its bins dealt to ranks in turn."""

    name = "NeMo-RL"
    ways = ("modified_first_fit_decreasing", "first_fit_decreasing")
    ours = "roll_batching"

    def __init__(self) -> None:
        import nemo_rl.data.packing.algorithms as module

        importlib.import_module("roll_batching.integrations.nemo_rl")  # adds our packer
        self._get_packer = module.get_packer

    def bins(self, case: Case, way: str) -> Bins:
        algorithm = self.ours if way == "ours" else way
        packer = self._get_packer(algorithm, case.cap, min_bin_count=case.ranks, bin_count_multiple=case.ranks)
        bins = packer.pack(case.lengths.tolist())
        return [bins[rank :: case.ranks] for rank in range(case.ranks)]


class Slime(Host):
    """`build_dp_schedule` with dynamic batches."""

    name = "slime"
    ways = ("default", "--balance-data", "--balance-data --balance-by-flops")
    _shape = {
        "micro_batch_size": 1,
        "use_dynamic_batch_size": True,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_query_groups": 8,
        "vocab_size": 151936,
        "ffn_hidden_size": 12288,
        "num_experts": None,
        "num_layers": 36,
        "kv_channels": 128,
    }

    def __init__(self) -> None:
        import slime.utils.dp_schedule as module

        self._own = module.build_dp_schedule
        self._flops = module.calculate_fwd_flops
        import roll_batching.integrations.slime as ours

        ours.unpatch()
        self._ours = ours.build_dp_schedule

    def cost(self, lengths: Lengths) -> NDArray[np.float64]:
        args = SimpleNamespace(**self._shape)
        return np.array([self._flops([int(length)], args) for length in lengths], dtype=np.float64)

    def bins(self, case: Case, way: str) -> Bins:
        data, flops = "--balance-data" in way, "--balance-by-flops" in way
        args = SimpleNamespace(**self._shape, max_tokens_per_gpu=case.cap, balance_data=data, balance_by_flops=flops)
        sizes = {
            "dp_size": case.ranks,
            "cp_size": 1,
            "vpp_size": 2 if case.multiple > 1 else 1,
            "microbatch_group_size_per_vp_stage": case.multiple,
        }
        build, count = self._ours if way == "ours" else self._own, len(case.lengths)
        parts, indices, _, _ = build(
            args, sizes, case.lengths.tolist(), global_batch_size=count, rollout_indices=list(range(count))
        )
        return dealt(parts, indices)


class Roll(Host):
    """`batch_balance` over ranks by equal numbers of samples, then `LoadBalancePacker` on each."""

    name = "ROLL"

    def __init__(self) -> None:
        stand_ins.install(["imageio", "modelscope", "transfer_queue"])
        from roll.utils import functionals
        from roll.utils.sequence_packing import LoadBalancePacker

        self._partition = functionals.get_seqlen_balanced_partitions
        import roll_batching.integrations.roll as ours

        ours.unpatch()
        self._ours, self._packer = ours, LoadBalancePacker

    def tokens(self, lengths: Lengths) -> Lengths:
        return -(-lengths // 16) * 16  # ROLL pads every sequence to a multiple of 16

    def bins(self, case: Case, way: str) -> Bins:
        work = self.cost(case.lengths).astype(np.int64).tolist()
        if way == "ours":
            parts = self._ours.get_seqlen_balanced_partitions(work, case.ranks, True)
            lengths = [case.lengths[part] for part in parts]
            planned = self._ours.plan_bins(lengths, case.cap, vp_size=case.multiple, sequence_multiple=16)
            return dealt(parts, planned)
        parts = self._partition(work, case.ranks, True)
        least = max(len(self._of_rank(case, part, 1)) for part in parts)
        return dealt(parts, [self._of_rank(case, part, least) for part in parts])

    def _of_rank(self, case: Case, part: list[int], least: int) -> list[list[int]]:
        import torch
        from roll.configs.worker_config import SequencePackingConfig
        from roll.distributed.scheduler.protocol import DataProto

        lengths = torch.tensor(case.lengths[part])
        batch = DataProto.from_dict({"attention_mask": (torch.arange(case.cap) < lengths[:, None]).long()})
        config = SequencePackingConfig(
            algorithm="load_balance", max_packed_sequence_length_train=case.cap, min_num_micro_batches_train=least
        )
        packer = self._packer(config)
        made = packer.make_micro_batch_iter_for_sequence_packing(
            batch, 1, 1, case.multiple, is_train=True, dp_group=object()
        )
        list(made)
        return copy.copy(batch.meta_info["partition_indices_list"])


def random_cases(count: int, seed: int, own: Lengths | None) -> Iterator[Case]:
    """Steps of lognormal lengths, or drawn from `own`, on 2 to 64 ranks."""
    generator = np.random.default_rng(seed)
    for _ in range(count):
        ranks, cap = int(2 ** generator.integers(1, 7)), int(generator.choice([4096, 8192, 16384]))
        samples = ranks * int(generator.integers(8, 65))
        if own is not None and generator.random() < 0.5:
            lengths = generator.choice(own, samples)
        else:
            lengths = generator.lognormal(generator.uniform(5.5, 7.8), generator.uniform(0.2, 1.2), samples)
        multiple = int(generator.choice([1, 1, 2, 4]))
        yield Case(lengths=np.clip(lengths, 16, cap).astype(np.int64), ranks=ranks, cap=cap, multiple=multiple)


def measure(host: Host, case: Case, way: str) -> tuple[Figures, float]:
    """Figures and seconds of one step."""
    began = time.perf_counter()
    bins = host.bins(case, way)
    spent = time.perf_counter() - began
    return figures(host, case, bins), spent


def show(host: Host) -> None:
    """A table of one step: 1,024 samples on 8 ranks."""
    lengths = np.clip(np.random.default_rng(0).lognormal(7.6, 0.9, 1024), 64, 16384).astype(np.int64)
    case = Case(lengths=lengths, ranks=8, cap=16384)
    measure(host, case, "ours")  # compiles
    for way in (*host.ways, "ours"):
        found, spent = measure(host, case, way)
        print(
            f"{host.name:8} {way:32} K {found.count:3}  slowest {found.slowest:.4f}  lockstep {found.lockstep:.4f}  "
            f"above the cap {found.above_cap:3} of {8 * found.count}  {spent:.2f} s",
            flush=True,
        )


def check(host: Host, cases: int, own: Lengths | None) -> int:
    """Compares random cases with each of the host's ways; prints and counts those in which ours is behind."""
    faults = 0
    compared = 0
    for number, case in enumerate(random_cases(cases, 1, own)):
        try:
            others = {way: measure(host, case, way)[0] for way in host.ways}
        except (AssertionError, ValueError):
            continue  # too few samples for a multiple, which the host refuses
        ours, _ = measure(host, case, "ours")
        compared += 1
        for way, other in others.items():
            if behind := ours.behind(other):
                faults += 1
                print(f"{host.name} case {number}: behind {way} in {', '.join(behind)}: {ours} {other} {case.ranks=}")
    print(f"{host.name}: behind in {faults} of {compared} random cases", flush=True)
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verl", action="store_true", help="the installed verl")
    parser.add_argument("--nemo-rl", type=Path, help="a checkout")
    parser.add_argument("--slime", type=Path, help="a checkout")
    parser.add_argument("--roll", type=Path, help="a checkout")
    parser.add_argument("--lengths", type=Path, help="a file of lengths, one a line, from which half of the cases draw")
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    own = None if given.lengths is None else np.loadtxt(given.lengths, dtype=np.int64)
    makers: list[Callable[[], Host]] = [Verl] if given.verl else []
    for checkout, maker in ((given.nemo_rl, NemoRL), (given.slime, Slime), (given.roll, Roll)):
        if checkout is not None:
            sys.path.insert(0, str(checkout.resolve()))
            makers.append(maker)
    if not makers:
        parser.error("name a host: --verl, --nemo-rl, --slime or --roll")
    faults = 0
    for maker in makers:
        host = maker()
        show(host)
        if given.check:
            faults += check(host, given.cases, own)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
