"""Plans are what they were: digests of the plans of random batches, by kind, which a change of planning changes.

Steps repeat after a resume and on other machines because plans do. Where plans change on purpose, the failing test
prints the digest to write here; whether they are better is for the benchmarks to say.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest

from roll_batching.planning import LinearQuadraticCost, PlanConstraints, SharedPrefixes, plan_step
from roll_batching.planning.pack_times import PackTimes

pytestmark = pytest.mark.planning

CASES = 16
COST = LinearQuadraticCost(linear=24576, quadratic=1, fixed=24576 * 64)
RECORDED: dict[str, tuple[dict[str, Any], str]] = {
    "packed": ({}, "8c0f66d253ab774e"),
    "lockstep": ({"objective": "lockstep"}, "a46c8229720b6763"),
    "pipeline": ({"pp_size": 4}, "43d50ee16ee8e5e9"),
    "interleaved": ({"pp_size": 2, "vpp_size": 2, "group_size": "auto"}, "652b9aafd668f561"),
    "dynamic": ({"mode": "dynamic"}, "ce6bb6cb2a8b5de5"),
    "aligned": ({"cp_size": 2, "sequence_multiple": 4, "pack_multiple": 16}, "fdc67dec1d4c8811"),
    "groups": ({"groups": 2, "max_tokens": 8192}, "25e7c5b75e9ed3e7"),
    "homes": ({"homes": True}, "8245cffc7a4db242"),
    "prefixes": ({"prefixes": True}, "f450f539294ca29d"),
    "sizes per pack": ({"max_cp_size": 4}, "e73b101334c1e73f"),
}


def digest_of(options: dict[str, Any]) -> str:
    options = dict(options)
    groups, homes, shares = (options.pop(name, None) for name in ("groups", "homes", "prefixes"))
    digest = hashlib.sha256()
    for seed in range(CASES):
        random = np.random.default_rng(seed)
        dp_size = int(random.choice([2, 4, 8])) if "max_cp_size" not in options else int(random.choice([4, 8]))
        count = int(random.integers(4, 40)) * dp_size
        lengths = random.lognormal(6.5, float(random.choice([0.4, 1.0, 1.5])), count).clip(16, 4096).astype(np.int64)
        constraints = PlanConstraints(dp_size=dp_size, **{"mode": "packed", "max_tokens": 4096, **options})
        times = None
        if "max_cp_size" in options:
            times = PackTimes(linear=1e9, quadratic=1e3, num_layers=8, hidden_size=512, kv_size=128)
        prefixes = None
        if shares:
            prompts = random.integers(8, 400, -(-count // 4))
            lengths = np.maximum(lengths, np.repeat(prompts, 4)[:count] + 1)
            prefixes = SharedPrefixes.of_groups(np.arange(count) // 4, np.repeat(prompts, 4)[:count], lengths)
        plan = plan_step(
            lengths,
            constraints,
            cost=None if times else COST,
            group_ids=np.arange(count) // groups if groups else None,
            home_rank=np.arange(count) % dp_size if homes else None,
            prefixes=prefixes,
            times=times,
        )
        blocks = [] if plan.blocks is None else [plan.blocks.first_ranks, plan.blocks.cp_sizes]
        for array in (plan.samples, plan.offsets, plan.slots, plan.tokens, *blocks):
            digest.update(np.ascontiguousarray(array, dtype="<i8").tobytes())
    return digest.hexdigest()[:16]


@pytest.mark.parametrize("kind", RECORDED)
def test_plans_are_those_that_were_recorded(kind: str) -> None:
    options, recorded = RECORDED[kind]
    assert digest_of(options) == recorded
