"""Planners of other projects, called through their own functions from a checkout.

Every function takes the checkout and the cost of a sequence, and returns a planner. For projects that only pack, packs
are assigned to ranks as the project does it; the docstrings say how.
"""

from __future__ import annotations

import ast
import inspect
import logging
import types
from bisect import bisect
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.planner.cases import COST, Bins, Planner
from roll_batching.planning import LinearQuadraticCost

LIGHT = ("copy", "heapq", "math", "random", "enum")


def functions_of(path: Path, names: set[str], given: dict[str, Any] | None = None) -> types.SimpleNamespace:
    """Functions and classes of a file by name, with their dependencies, without importing its package.

    `given` supplies imported names, and replaces definitions of the same name.
    """
    given = given or {}
    tree = ast.parse(path.read_text())
    defined = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    missing = sorted(names - set(defined))
    if missing:
        raise SystemExit(f"{path} has no {', '.join(missing)}; see docs/benchmarks.md for the commits that were used")
    needed: set[str] = set()
    open_names = set(names)
    while open_names:
        name = open_names.pop()
        needed.add(name)
        used = {one.id for one in ast.walk(defined[name]) if isinstance(one, ast.Name)}
        open_names |= (used & set(defined)) - needed - set(given)
    wanted = [node for name, node in defined.items() if name in needed]
    imports = [node for node in tree.body if isinstance(node, ast.Import)]
    light = [node for node in imports if all(alias.name in LIGHT for alias in node.names)]
    future = ast.parse("from __future__ import annotations").body
    # Names from torch and logging in annotations; they compute nothing.
    data = types.SimpleNamespace(IterableDataset=object)
    torch = types.SimpleNamespace(utils=types.SimpleNamespace(data=data))
    space: dict[str, Any] = {"torch": torch, "logger": logging.getLogger(path.stem), **given}
    exec(compile(ast.Module(future + light + wanted, []), str(path), "exec"), space)  # noqa: S102
    return types.SimpleNamespace(**{name: space[name] for name in names})


def round_robin(packs: list[list[int]], dp: int) -> Bins:
    """Assign pack i to rank i % dp; ranks with one pack fewer end with an empty micro-batch."""
    packs = packs + [[] for _ in range(-len(packs) % dp)]
    return [packs[rank::dp] for rank in range(dp)]


def verl(root: Path, cost: LinearQuadraticCost = COST) -> Planner:
    """verl: Karmarkar-Karp of equal counts over DP, then over ceil(tokens / cap) micro-batches, sorted by cost."""
    peer = functions_of(root / "verl/utils/seqlen_balancing.py", {"karmarkar_karp", "get_seqlen_balanced_partitions"})

    def plan(lengths: np.ndarray, dp: int, cap: int) -> Bins:
        work = [cost.sequence(int(n)) for n in lengths]
        ranks = peer.get_seqlen_balanced_partitions(work, dp, equal_size=len(work) % dp == 0)
        count = max(-(-int(lengths[rank].sum()) // cap) for rank in ranks)
        bins = []
        for rank in ranks:
            parts = peer.get_seqlen_balanced_partitions([work[i] for i in rank], count, equal_size=False)
            chosen = [[rank[i] for i in part] for part in parts]
            chosen.sort(key=lambda members: -sum(work[i] for i in members))
            bins.append(chosen[::2][::-1] + chosen[1::2])
        return bins

    return plan


def slime(root: Path, cost: LinearQuadraticCost = COST, *, by_flops: bool = False) -> Planner:
    """slime's `build_dp_schedule` with `balance_data`: first fit in the given order, Karmarkar-Karp of packs over DP.

    `by_flops`: packs by Karmarkar-Karp of costs, which has no cap.
    """
    balancing = functions_of(
        root / "slime/utils/seqlen_balancing.py",
        {"first_fit_pack", "expand_bins_by_splitting", "get_seqlen_balanced_partitions"},
    )
    flops = {"calculate_fwd_flops": lambda lengths, args: sum(map(cost.sequence, lengths))}
    peer = functions_of(root / "slime/utils/dp_schedule.py", {"build_dp_schedule"}, {**vars(balancing), **flops})

    def plan(lengths: np.ndarray, dp: int, cap: int) -> Bins:
        args = types.SimpleNamespace(
            use_dynamic_batch_size=True, max_tokens_per_gpu=cap, balance_data=True, balance_by_flops=by_flops
        )
        layout = {"dp_size": dp, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
        n = len(lengths)
        ranks, packs, _, _ = peer.build_dp_schedule(
            args, layout, lengths.tolist(), global_batch_size=n, rollout_indices=list(range(n))
        )
        return [[[ranks[rank][i] for i in pack] for pack in packs[rank]] for rank in range(dp)]

    return plan


def prime_rl(root: Path, cost: LinearQuadraticCost = COST) -> Planner:
    """prime-rl's `prepare_batch` without its tensors: first-fit-decreasing, splits, Karmarkar-Karp, best swaps.

    If the count cannot become a multiple of the ranks, copies of the first pack fill up, as in prime-rl.
    """
    given = {
        "dataclass": dataclass,
        "field": field,
        "_materialize_bin": lambda content: types.SimpleNamespace(
            packed=content.samples, sequence_lengths=[len(sample.input_ids) for sample in content.samples]
        ),
    }
    names = {"packed_samples_into_micro_bs", "_distribute_group"}
    peer = functions_of(root / "src/prime_rl/trainer/batch.py", names, given)

    def bin_cost(lengths: list[int]) -> int:
        return cost.linear * sum(lengths) + cost.quadratic * sum(n * n for n in lengths)

    def plan(lengths: np.ndarray, dp: int, cap: int) -> Bins:
        samples = [
            types.SimpleNamespace(index=i, input_ids=range(int(n)), routed_experts=None, mm_kwargs=None)
            for i, n in enumerate(lengths)
        ]
        packs = peer.packed_samples_into_micro_bs(samples, cap, dp, bin_cost)
        packs += [packs[0]] * (-len(packs) % dp)
        ranks = peer._distribute_group(packs, dp, bin_cost)
        return [[[sample.index for sample in pack.packed] for pack in rank] for rank in ranks]

    return plan


def nemo_rl(root: Path, algorithm: str) -> Planner:
    """One of NeMo-RL's packers with a multiple of the ranks as bin count; `shard_by_batch_size` assigns round-robin."""
    names = {
        "concatenative": "ConcatenativePacker",
        "first_fit_decreasing": "FirstFitDecreasingPacker",
        "first_fit_shuffle": "FirstFitShufflePacker",
        "modified_first_fit_decreasing": "ModifiedFirstFitDecreasingPacker",
    }
    given = {"ABC": object, "abstractmethod": lambda method: method, "bisect": bisect}
    peer = functions_of(root / "nemo_rl/data/packing/algorithms.py", {names[algorithm]}, given)
    make = vars(peer)[names[algorithm]]
    random = make.pack.__globals__["random"]  # draws the order of the shuffle

    def plan(lengths: np.ndarray, dp: int, cap: int) -> Bins:
        random.seed(0)
        packer = make(bin_capacity=cap, min_bin_count=dp, bin_count_multiple=dp)
        return round_robin(packer.pack(lengths.tolist()), dp)

    return plan


def trl(root: Path) -> Planner:
    """TRL's online token-budget batcher: a sample joins the fitting row with the smallest sum of L^2."""
    peer = functions_of(
        root / "trl/experimental/async_grpo/async_grpo_trainer.py",
        {"TokenBudgetBatcher", "_balance_by_squared_length"},
    )

    def plan(lengths: np.ndarray, dp: int, cap: int) -> Bins:
        samples = [{"index": i, "input_ids": range(int(n))} for i, n in enumerate(lengths)]
        steps = list(peer.TokenBudgetBatcher(samples, dp, cap))
        return [[[sample["index"] for sample in step[rank]] for step in steps] for rank in range(dp)]

    return plan


def trl_packed(root: Path) -> Planner:
    """TRL's `pack_dataset(strategy="bfd")`: best-fit-decreasing; the trainer's loader assigns packs round-robin.

    Every token holds the number of its sample, so the packed column names the samples of a pack.
    """
    import pyarrow
    import pyarrow.compute

    given = {
        "pa": pyarrow,
        "pyarrow": pyarrow,
        "pc": pyarrow.compute,
        "np": np,
        "deque": deque,
        "defaultdict": defaultdict,
    }
    peer = functions_of(root / "trl/data_utils.py", {"_pack_bfd"}, given)

    def plan(lengths: np.ndarray, dp: int, cap: int) -> Bins:
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        tokens = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        table = pyarrow.table({"input_ids": pyarrow.ListArray.from_arrays(offsets, pyarrow.array(tokens))})
        packed = peer._pack_bfd(table, cap)
        column = packed["input_ids"].combine_chunks()
        found, starts = column.values.to_numpy(), column.offsets.to_numpy()
        packs, at = [], int(starts[0])
        for pack in packed["seq_lengths"].to_pylist():
            packs.append([int(found[i]) for i in at + np.cumsum([0, *pack[:-1]])])
            at += sum(pack)
        return round_robin(packs, dp)

    return plan


def megatron(root: Path) -> Planner:
    """Megatron-LM's `DpBalancedScheduler`: next fit in the given order; packs are assigned to ranks in order."""
    peer = functions_of(root / "megatron/core/datasets/data_schedule.py", {"DpBalancedScheduler"})

    def plan(lengths: np.ndarray, dp: int, cap: int) -> Bins:
        scheduler = peer.DpBalancedScheduler(cap, 1, dp, None)
        steps = scheduler.get_groups_and_subsamples(list(enumerate(lengths.tolist())))
        return [[step[rank] for step in steps] for rank in range(dp)]

    return plan


def prtpy_planner() -> Planner:
    """prtpy's first-fit-decreasing bins, assigned round-robin, because prtpy has no ranks."""
    import prtpy

    def plan(lengths: np.ndarray, dp: int, cap: int) -> Bins:
        items = {i: int(n) for i, n in enumerate(lengths)}
        packs = prtpy.pack(algorithm=prtpy.packing.first_fit_decreasing, binsize=cap, items=items)
        return round_robin(packs, dp)

    return plan


@dataclass(frozen=True)
class Peer:
    """Planner of another project."""

    project: str
    maker: Callable[..., Planner]
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def by_cost(self) -> bool:
        """Whether it reads costs; otherwise it reads only lengths."""
        return "cost" in inspect.signature(self.maker).parameters

    def make(self, root: Path, cost: LinearQuadraticCost) -> Planner:
        return self.maker(root, **({"cost": cost} if self.by_cost else {}), **self.settings)


PROJECTS = ("verl", "slime", "prime_rl", "nemo_rl", "trl", "megatron")
PEERS = {
    "verl": Peer("verl", verl),
    "slime": Peer("slime", slime),
    "slime by FLOPs": Peer("slime", slime, {"by_flops": True}),
    "prime-rl": Peer("prime_rl", prime_rl),
    "NeMo-RL concatenative": Peer("nemo_rl", nemo_rl, {"algorithm": "concatenative"}),
    "NeMo-RL FFD": Peer("nemo_rl", nemo_rl, {"algorithm": "first_fit_decreasing"}),
    "NeMo-RL FF shuffle": Peer("nemo_rl", nemo_rl, {"algorithm": "first_fit_shuffle"}),
    "NeMo-RL MFFD": Peer("nemo_rl", nemo_rl, {"algorithm": "modified_first_fit_decreasing"}),
    "TRL BFD": Peer("trl", trl_packed),
    "TRL batcher": Peer("trl", trl),
    "Megatron-LM": Peer("megatron", megatron),
}
