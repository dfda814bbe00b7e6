"""Other projects' planners, called through their own functions from a checkout's path."""

from __future__ import annotations

import ast
import logging
import types
from pathlib import Path

import numpy as np
from _planner_cases import COST, Bins, Planner


def functions_of(path: Path, names: set[str]) -> types.SimpleNamespace:
    """Functions and classes of a file by name (and what they use), without importing the package around it."""
    tree = ast.parse(path.read_text())
    defined = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    needed, open_names = set(), set(names)
    while open_names:
        name = open_names.pop()
        needed.add(name)
        used = {one.id for one in ast.walk(defined[name]) if isinstance(one, ast.Name)}
        open_names |= (used & set(defined)) - needed
    wanted = [node for name, node in defined.items() if name in needed]
    imports = [node for node in tree.body if isinstance(node, ast.Import)]
    light = [node for node in imports if all(a.name in ("copy", "heapq", "math", "random") for a in node.names)]
    future = ast.parse("from __future__ import annotations").body
    # What the chosen definitions name from torch and logging; nothing of it computes.
    data = types.SimpleNamespace(IterableDataset=object)
    torch = types.SimpleNamespace(utils=types.SimpleNamespace(data=data))
    space: dict = {"torch": torch, "logger": logging.getLogger(path.stem)}
    exec(compile(ast.Module(future + light + wanted, []), str(path), "exec"), space)  # noqa: S102
    return types.SimpleNamespace(**{name: space[name] for name in names})


def verl(root: Path) -> Planner:
    """verl: Karmarkar-Karp of equal counts over DP, then over ceil(tokens / cap) micro-batches, sorted by cost."""
    peer = functions_of(root / "verl/utils/seqlen_balancing.py", {"karmarkar_karp", "get_seqlen_balanced_partitions"})

    def plan(lengths: np.ndarray, dp: int, cap: int) -> Bins:
        work = [COST.sequence(int(n)) for n in lengths]
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


def slime(root: Path) -> Planner:
    """slime's default: first fit in the given order, Karmarkar-Karp of packs over DP by cost."""
    peer = functions_of(
        root / "slime/utils/seqlen_balancing.py",
        {
            "karmarkar_karp",
            "get_seqlen_balanced_partitions",
            "first_fit_pack",
            "expand_bins_by_splitting",
        },
    )

    def plan(lengths: np.ndarray, dp: int, cap: int) -> Bins:
        sizes = [int(n) for n in lengths]
        packs = peer.first_fit_pack(sizes, cap)
        target = -(-len(packs) // dp) * dp
        if target != len(packs):
            peer.expand_bins_by_splitting(packs, target, sizes)
        work = [sum(COST.sequence(sizes[i]) for i in members) for members in packs]
        ranks = peer.get_seqlen_balanced_partitions(work, dp, equal_size=True)
        return [[packs[i] for i in rank] for rank in ranks]

    return plan


def trl(root: Path) -> Planner:
    """TRL's token-budget batcher: online, a sample joins the row with the smallest sum of L^2 that has room."""
    peer = functions_of(
        root / "trl/experimental/async_grpo/async_grpo_trainer.py",
        {"TokenBudgetBatcher", "_balance_by_squared_length"},
    )

    def plan(lengths: np.ndarray, dp: int, cap: int) -> Bins:
        samples = [{"index": i, "input_ids": range(int(n))} for i, n in enumerate(lengths)]
        steps = list(peer.TokenBudgetBatcher(samples, dp, cap))
        return [[[sample["index"] for sample in step[rank]] for step in steps] for rank in range(dp)]

    return plan


def prtpy_planner() -> Planner:
    """prtpy's first-fit-decreasing bins, dealt round-robin (it knows no ranks)."""
    import prtpy

    def plan(lengths: np.ndarray, dp: int, cap: int) -> Bins:
        items = {i: int(n) for i, n in enumerate(lengths)}
        packs = prtpy.pack(algorithm=prtpy.packing.first_fit_decreasing, binsize=cap, items=items)
        packs += [[] for _ in range(-len(packs) % dp)]
        return [packs[rank::dp] for rank in range(dp)]

    return plan
