"""Update and log-prob passes whose samples share prompts, with the prompts computed once and once per sample.

    python benchmarks/bench_shared_prefixes.py --device cpu --check
    python benchmarks/bench_shared_prefixes.py --device cuda --json shared_prefixes.json

One process, one model; both ways see the same samples in turn. A figure is the median of the rounds' ratios, with half
of their interquartile range beside it; a limit that is missed by less than this holds, unless this is above a tenth of
the figure: then `--check` fails as too noisy. An update is one
training step of a policy loss over the responses, a log-prob pass computes the responses' log-probs. The time includes
packing, and not the planner's, which is a figure beside it. Lengths are those of the cases below for packs of 32,768
tokens, and an eighth of them on a CPU; every group has eight answers. `share_prefixes` is `auto`, so the last case,
whose prompts are less than 5% of the tokens, shares nothing.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs in a checkout that is not installed

from roll_batching.known_warnings import hide_known_warnings

hide_known_warnings()  # before Megatron is imported

from benchmarks.bench_step import decoder
from benchmarks.measure import arguments, finish, peak_bytes, ratio, times

ANSWERS = 8
SHAPES = {
    "cpu": decoder(256, 4, 8, 2, 704, 2048),
    "cuda": decoder(2048, 28, 16, 8, 6144, 151936, kv_channels=128, qk_layernorm=True, tie_word_embeddings=True),
}
GROUPS = {"cpu": 4, "cuda": 8}
CAP = {"cpu": 4096, "cuda": 32768}
FULL = 32768
"""Cap of packs for which the lengths of the cases are meant; with another one they are in proportion."""

Lengths = tuple[float, float, int, int]
"""Median and sigma of a lognormal distribution, least and most."""
CASES: dict[str, tuple[Lengths, Lengths]] = {
    "long prompts (7k), short answers (1.1k)": ((6000, 0.6, 500, 28000), (800, 0.8, 16, 4096)),
    "TRL's lengths (0.3k, 1k)": ((256, 0.43, 16, 1024), (700, 0.9, 16, 4096)),
    "short prompts (0.2k), long answers (5k)": ((200, 0.5, 32, 1024), (3500, 1.0, 16, 15000)),
}
FASTER = {"cpu": (2.5, 1.1, 0.99), "cuda": (3.0, 1.15, 0.99)}
"""Limits of `--check` by case: smallest ratio of times of an update and of a log-prob pass, without over with."""
MOST_SPREAD = 0.1
"""Limit of `--check`: largest spread of a ratio, as a part of it; a larger one would excuse any ratio."""
MEMORY = 1.02
"""Limit of `--check`: largest ratio of peak memory of an update, with over without."""


def batch_of(case: str, device: str, cap: int, vocabulary: int) -> Any:
    """Samples of a case with the fields of a policy loss."""
    from roll_batching.samples import SampleBatch

    random, scale = np.random.default_rng(5), FULL / cap

    def draw(lengths: Lengths, count: int) -> list[int]:
        median, sigma, least, most = lengths
        values = random.lognormal(np.log(median), sigma, count).clip(least, most) / scale
        return [int(value) for value in values.clip(2)]

    generator = torch.Generator().manual_seed(5)
    prompts, answers = CASES[case]
    rows, masks = [], []
    for prompt in draw(prompts, GROUPS[device]):
        start = torch.randint(vocabulary, (prompt,), generator=generator)
        for answer in draw(answers, ANSWERS):
            rows.append(torch.cat([start, torch.randint(vocabulary, (answer,), generator=generator)])[:cap])
            masks.append(torch.arange(len(rows[-1])) >= prompt)
    fields = {
        "input_ids": rows,
        "response_mask": masks,
        "advantages": torch.randn(len(rows), generator=generator),
        "old_log_probs": [torch.full((len(row),), -8.0) for row in rows],
    }
    kinds = {"input_ids": "token", "response_mask": "token", "advantages": "sample", "old_log_probs": "next_token"}
    return SampleBatch.from_lists(fields, kinds)


def make_strategy(device: str, cap: int, vocabulary: int) -> Any:
    from roll_batching.jobs.config import WorkerConfig
    from roll_batching.strategy import MegatronTrainStrategy

    config = {
        "model_args": {"architecture": {**SHAPES[device], "vocab_size": vocabulary, "max_position_embeddings": cap}},
        "training_args": {"learning_rate": 1e-5},
        "strategy_args": {"strategy_name": "megatron_train", "strategy_config": {}},
        "use_sequence_packing": True,
        "sequence_packing_args": {"max_packed_sequence_length_train": cap, "share_prefixes": "auto"},
    }
    strategy = MegatronTrainStrategy(WorkerConfig.model_validate(config), seed=1)
    strategy.initialize()
    return strategy


def compare(strategy: Any, case: str, least: float, batch: Any, device: str, rounds: int) -> dict[str, Any]:
    from roll_batching.losses import PolicyLoss
    from roll_batching.samples import find_shared_prefixes, gather_lengths

    loss = PolicyLoss()
    table = gather_lengths(batch)
    found = time.perf_counter()
    shared = find_shared_prefixes(batch, table)
    planned = time.perf_counter()
    plans = {"with": strategy.plan(shared), "without": strategy.plan(table)}
    took = time.perf_counter() - planned
    updates: dict[str, Callable[[], Any]] = {
        way: lambda plan=plan: strategy.train_step(batch, plan, loss) for way, plan in plans.items()
    }
    passes: dict[str, Callable[[], Any]] = {
        way: lambda plan=plan: strategy.compute_log_probs(batch, plan, masks=("response_mask",))
        for way, plan in plans.items()
    }
    update, log_probs = (times(runs, device, rounds) for runs in (updates, passes))
    faster = {
        name: ratio(found["without"], found["with"]) for name, found in (("update", update), ("log-probs", log_probs))
    }
    peak = {way: peak_bytes(run, device) for way, run in updates.items()}
    tokens = {way: plan.report.computed_tokens for way, plan in plans.items()}
    return {
        "case": case,
        "figures": {
            "tokens with": tokens["with"],
            "tokens without": tokens["without"],
            **{f"{name}, times faster": median for name, (median, _) in faster.items()},
            **{f"{name}, spread": spread for name, (_, spread) in faster.items()},
            **{f"update {way}, seconds": statistics.median(found) for way, found in update.items()},
            **{f"peak {way}, MiB": value / 2**20 for way, value in peak.items()},
            "finding prefixes, seconds": planned - found,
            "both plans, seconds": took,
        },
        "limits": {
            **limits_of_times(faster, least),
            "peak memory with over without": [peak["with"] / peak["without"], MEMORY],
        },
    }


def limits_of_times(faster: dict[str, tuple[float, float]], least: float) -> dict[str, list[float]]:
    """Limits of the ratios in `faster`, each with its spread."""
    limits = {}
    for name, (median, spread) in faster.items():
        limits[f"{name}, time with over without, less the spread"] = [1 / (median + spread), 1 / least]
        limits[f"{name}, spread (above the limit: too noisy: run it alone)"] = [spread / median, MOST_SPREAD]
    return limits


def main() -> None:
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    given = arguments(__doc__, rounds=5)
    device = given.device
    cap, vocabulary = given.tokens or CAP[device], given.vocabulary or SHAPES[device]["vocab_size"]
    strategy = make_strategy(device, cap, vocabulary)
    cases = [
        compare(strategy, case, least, batch_of(case, device, cap, vocabulary), device, given.rounds)
        for case, least in zip(CASES, FASTER[given.device], strict=True)
    ]
    finish(given, cases)


if __name__ == "__main__":
    main()
