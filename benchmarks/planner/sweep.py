"""A grid of cases, planned by this package and by every given peer.

A case is a batch of lengths, a number of data-parallel ranks, a cap and a cost. The same function measures
all plans. Results of peers are cached in `--cache`, one file per peer, by commit and case.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.planner.cases import Bins, Planner
from benchmarks.planner.peers import PEERS, Peer
from roll_batching.planning import (
    LinearQuadraticCost,
    PlanConstraints,
    pack_bins,
    plan_step,
    quadratic_cost,
    token_cost,
)
from roll_batching.planning.lengths_io import read_lengths

SIZES = (64, 256, 1024, 8192)
RANKS = (1, 2, 4, 8, 16, 32, 64, 128)
CAPS = (8192, 16384, 32768)
COSTS = {"L": token_cost(), "L^2": quadratic_cost(), "both": LinearQuadraticCost()}
OBJECTIVES = {"rank": "auto", "lockstep": "ep"}
"""Objectives, each with the layout whose plan it measures."""
BATCHES = 5
"""Batches per file and size, in the order of the file."""


@dataclass(frozen=True)
class Case:
    source: str
    """ "lognormal", or a path of a file with lengths."""
    seed: int
    """Seed of the lognormal lengths, or number of the file's batch."""
    n: int
    ranks: int
    cap: int
    cost: str

    @property
    def key(self) -> str:
        return "/".join(str(value) for value in asdict(self).values())

    @classmethod
    def of(cls, key: str) -> Case:
        source, seed, n, ranks, cap, cost = key.rsplit("/", 5)
        return cls(source, int(seed), int(n), int(ranks), int(cap), cost)

    def at_least_as_hard_as(self, other: Case) -> bool:
        """Whether it has at least as many sequences of the same source, as many ranks, and no larger cap."""
        same = (self.source, self.ranks) == (other.source, other.ranks)
        return same and self.n >= other.n and self.cap <= other.cap

    def lengths(self) -> np.ndarray:
        return _lengths(self.source, self.seed, self.n, self.cap)


@lru_cache(maxsize=64)
def _lengths(source: str, seed: int, n: int, cap: int) -> np.ndarray:
    """int64 `[n]`, each at most `cap`."""
    if source == "lognormal":
        drawn = np.random.default_rng(seed).lognormal(np.log(2400), 0.9, n)
        return np.clip(drawn, 16, cap).astype(np.int64)
    return np.minimum(_file(source)[seed * n : (seed + 1) * n], cap)


@lru_cache
def _file(path: str) -> np.ndarray:
    return read_lengths(path)


def grid(seeds: int, files: list[Path], every: int) -> list[Case]:
    """All cases in a fixed random order, or each `every`-th of them.

    A file's sequences above the cap count as the cap; where its longest is above all caps, the power of two that
    holds it is one more. On one rank there is nothing to balance, so one cost shows the number of micro-batches.
    """
    sources = [("lognormal", seed, n, CAPS) for seed in range(seeds) for n in SIZES]
    for file in files:
        lengths = _file(str(file))
        own = 1 << int(lengths.max() - 1).bit_length()
        caps = (*CAPS, own) if own > max(CAPS) else CAPS
        sources += [(str(file), i, n, caps) for n in SIZES for i in range(min(BATCHES, len(lengths) // n))]
    cases = [
        Case(source, seed, n, ranks, cap, cost)
        for source, seed, n, caps in sources
        for ranks in RANKS
        for cap in caps
        for cost in (COSTS if ranks > 1 else ("L",))
        if ranks <= n
    ]
    # Ordered by a digest of the case, so that a smaller grid has the same order.
    cases.sort(key=lambda case: hashlib.sha256(case.key.encode()).digest())
    return cases[::every]


def judge(bins: Bins, lengths: np.ndarray, cap: int, cost: LinearQuadraticCost, *, sort: bool) -> dict[str, float]:
    """Figures of a plan: rank total and lockstep over the mean, K, packs over the cap, misplaced sequences.

    `sort`: order the packs of each rank by falling cost, which minimizes lockstep.
    """
    work = cost.linear * lengths + cost.quadratic * lengths * lengths
    count = max(map(len, bins))
    table = np.zeros((len(bins), count), dtype=np.int64)
    over = 0
    placed = np.zeros(len(lengths), dtype=np.int64)
    for rank, packs in enumerate(bins):
        for k, pack in enumerate(packs):
            table[rank, k] = work[pack].sum() if pack else 0
            over += bool(pack) and int(lengths[pack].sum()) > cap
            placed[pack] += 1
    if sort:
        table = -np.sort(-table, axis=1)
    mean = int(work.sum()) / len(bins)
    return {
        "rank": int(table.sum(axis=1).max()) / mean,
        "lockstep": int(table.max(axis=0).sum()) / mean,
        "K": count,
        "over": over,
        "missing": int((placed == 0).sum()),
    }


def plan_ours(case: Case) -> dict[str, dict[str, float]]:
    """Our plans of a case by layout: plain data parallelism ("auto"), or experts shared by all ranks ("ep")."""
    lengths, cost = case.lengths(), COSTS[case.cost]
    found = {}
    for layout, sizes in {"auto": {}, "ep": {"ep_size": case.ranks}}.items():
        constraints = PlanConstraints(dp_size=case.ranks, max_tokens=case.cap, **sizes)
        start = time.thread_time()
        plan = plan_step(lengths, constraints, cost=cost)
        seconds = time.thread_time() - start
        bins = [[mb.samples.tolist() for mb in rank] for rank in plan.micro_batches]
        judged = judge(bins, lengths, case.cap, cost, sort=False)
        found[layout] = judged | {"seconds": seconds, "bound": 1 + plan.report.lower_bound}
    return found


@lru_cache(maxsize=256)
def our_bins(source: str, seed: int, n: int, cap: int) -> dict[str, int]:
    """Number of bins of our packers for all sequences of a batch."""
    lengths = _lengths(source, seed, n, cap)
    return {name: len(pack_bins(lengths, cap, name)) for name in ("best", "modified_first_fit_decreasing")}


class OverTheLimit(BaseException):
    """A peer exceeded its time limit. A BaseException, so that `except Exception` of a peer does not catch it."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Limit the processor time of the block; Linux and macOS, main thread only."""
    end = time.thread_time() + seconds

    def look(signum: int, frame: Any) -> None:
        left = end - time.thread_time()
        if left <= 0:
            raise OverTheLimit
        signal.setitimer(signal.ITIMER_REAL, max(left, 0.001))

    before = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class PeerRuns:
    """Figures of one peer on cases, cached.

    A result is {"rank", "lockstep", ...} as of `judge` with "seconds", or {"refused": why}, or {"limit": seconds}.
    A peer that was over the limit is not tried on as many sequences or more of that source, with the same ranks and
    the same cap or a smaller one: there are more packs to look at. Such a case is over the limit, too.
    """

    def __init__(self, name: str, root: Path, limit: float, cache: Path | None) -> None:
        self.peer: Peer = PEERS[name]
        self.limit = limit
        self.commit = commit_of(root)
        self.planners: dict[str, Planner] = {
            cost: self.peer.make(root, COSTS[cost]) for cost in (COSTS if self.peer.by_cost else ("L",))
        }
        self.results: dict[str, dict] = {}
        self.too_slow: list[Case] = []
        self.file: Path | None = None
        if cache is not None:
            cache.mkdir(parents=True, exist_ok=True)
            # The cache key includes the code that calls the peer and measures its plans.
            code = inspect.getsource(self.peer.maker) + inspect.getsource(judge)
            digest = hashlib.sha256(code.encode()).hexdigest()[:8]
            self.file = cache / f"{name.replace(' ', '_')}-{self.commit[:12]}-{digest}.jsonl"
            if self.file.exists():
                for line in self.file.read_text().splitlines():
                    key, result = json.loads(line)
                    if result.get("seconds", 0) > limit:
                        result = {"limit": limit, "tried": True}
                    if result.get("limit", limit) >= limit:
                        self.results[key] = result
                        if result.get("tried"):
                            self.too_slow.append(Case.of(key))

    def __call__(self, case: Case) -> dict:
        if case.key not in self.results:
            for cost, result in self.plan(case).items():
                key = Case(**{**asdict(case), "cost": cost}).key
                self.results[key] = result
                if self.file is not None:
                    with self.file.open("a") as stream:
                        stream.write(json.dumps([key, result]) + "\n")
        return self.results[case.key]

    def plan(self, case: Case) -> dict[str, dict]:
        """Results by cost; one plan serves all costs if the peer reads only lengths."""
        lengths = case.lengths()
        costs = [case.cost] if self.peer.by_cost else list(COSTS)
        if any(case.at_least_as_hard_as(other) for other in self.too_slow):
            return dict.fromkeys(costs, {"limit": self.limit, "tried": False})
        start = time.thread_time()
        try:
            with time_limit(self.limit):
                bins = self.planners[case.cost if self.peer.by_cost else "L"](lengths, case.ranks, case.cap)
        except OverTheLimit:
            self.too_slow.append(case)
            return dict.fromkeys(costs, {"limit": self.limit, "tried": True})
        except (AssertionError, ValueError) as error:
            return dict.fromkeys(costs, {"refused": str(error)[:100]})
        seconds = time.thread_time() - start
        if not any(pack for rank in bins for pack in rank):
            return dict.fromkeys(costs, {"refused": "placed none"})
        return {cost: judge(bins, lengths, case.cap, COSTS[cost], sort=True) | {"seconds": seconds} for cost in costs}


def commit_of(root: Path) -> str:
    found = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    if found.returncode:
        raise SystemExit(f"{root} is no git checkout, and results are reported with the peer's commit: git clone it")
    return found.stdout.strip()


def run_sweep(cases: list[Case], peers: dict[str, PeerRuns], progress: Any) -> list[dict]:
    """A row per case: the case, our figures by layout, peers' figures by name, and bins on one rank."""
    plan_ours(cases[0])  # compiles
    rows = []
    # Easy cases first: a peer that exceeds the limit there is not tried on harder ones.
    for i, case in enumerate(sorted(cases, key=lambda case: (case.n, -case.cap))):
        row = {"case": asdict(case), "ours": plan_ours(case), "peers": {name: run(case) for name, run in peers.items()}}
        if case.ranks == 1:
            row["bins"] = our_bins(case.source, case.seed, case.n, case.cap)
        rows.append(row)
        if i % 100 == 99:
            progress(f"{i + 1} of {len(cases)} cases")
    return rows
