"""Cost of a GRPO step for a driver on Ray: processor time, bytes in the object store, and calls.

    python benchmarks/bench_driver.py                       # 16,384 samples of 2k tokens on average, 64 ranks
    python benchmarks/bench_driver.py --check               # exit 1 if a figure exceeds its limit
    python benchmarks/bench_driver.py --json driver.json

Eight actors without torch represent 64 ranks: each is called as eight of them, reads their samples, and returns
log-probs where they would. Ray runs on this machine, and the driver's code is that of `WorkerGroup`. A step plans,
distributes samples, computes log-probs under two models (old and reference), adds advantages, and trains. Time is
processor time of all threads of the driver. Bytes are those in Ray's object store at the end of the step, before
anything is freed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs in a checkout that is not installed

import numpy as np

ACTORS = 8
CAP = 16384
SECONDS, SHARE = 2.0, 1.1
"""Limits of --check: processor seconds per step, and stored bytes over bytes of the samples."""


class FakeRanks:
    """Actor that represents several ranks without a model; it reads samples and returns zeros as log-probs."""

    def as_rank(self, rank: int, dp_rank: int, reports: bool, method: str, _: Any, name: str, *handed: Any) -> Any:
        """Do what `StrategyRank.call_with_samples` does on `rank`, without a model."""
        from roll_batching.jobs.driver.columns import Column, replica_samples

        assert "torch" not in sys.modules
        plan, *parts = handed[1:]
        columns = {field: column for part in parts for field, column in part.items()}
        tokens = int(replica_samples(plan, dp_rank)[1].sum())
        assert all(len(column.values) == tokens for column in columns.values() if column.per_token)
        read = sum(int(column.values.view(np.uint8).sum()) for column in columns.values())
        if method == "train_step":
            return ({"read": read} if rank == 0 else None), None
        made = Column(values=np.zeros(tokens, np.float32), kind="next_token", pad=0, dtype="float32")
        return None, {name: made} if reports else None


class FakeRank:
    """Handle of one rank that an actor represents; counts calls."""

    def __init__(self, actor: Any, rank: int, layout: Any) -> None:
        self.actor, self.place, self.calls = actor, (rank, layout.dp_rank, layout.is_replica_leader), 0

    @property
    def call_with_samples(self) -> FakeRank:
        """Method handle, as of an actor."""
        return self

    def options(self, **given: Any) -> FakeRank:
        """Options of the method handle, as of an actor."""
        assert given == {"num_returns": 2}
        return self

    def remote(self, *arguments: Any) -> Any:
        """Call the actor as this rank."""
        self.calls += 1
        return self.actor.as_rank.options(num_returns=2).remote(*self.place, *arguments)


def rollouts(samples: int, mean: int) -> Any:
    """Samples of a step: prompts, responses and rollout log-probs."""
    import torch

    from roll_batching.samples import SampleBatch

    drawn = np.random.default_rng(0).lognormal(0, 0.6, samples)
    lengths = torch.from_numpy((drawn * mean / drawn.mean()).clip(16, CAP).astype(np.int64))
    count = int(lengths.sum())
    fields = {
        "input_ids": torch.arange(count) % 150_000,
        "response_mask": torch.arange(count) % 5 > 0,
        "rollout_log_probs": torch.full((count,), -0.5),
    }
    kinds = {"input_ids": "token", "response_mask": "token", "rollout_log_probs": "next_token"}
    return SampleBatch(torch.arange(samples), lengths, fields, kinds)


def stored() -> int:
    """Bytes in the object store, once the free memory that Ray reports is stable."""
    import ray

    found, last = 0, -1
    while found != last:
        last = found
        time.sleep(2.0)
        found = int(ray.cluster_resources()["object_store_memory"] - ray.available_resources()["object_store_memory"])
    return found


def measure(batch: Any, ranks: int, tp_size: int, actors: list[Any]) -> dict[str, Any]:
    """Figures of one step on `ranks` ranks."""
    import torch

    from roll_batching.jobs.driver.shard_distribution import (
        FieldShards,
        RankLayout,
        call_ranks,
        distribute_batch,
        with_fields,
    )
    from roll_batching.jobs.launch.on_ray.actors import RankActors
    from roll_batching.planning import PlanConstraints, plan_step

    dp_size = ranks // tp_size
    layouts = [
        RankLayout(
            dp_rank=rank // tp_size, is_first_stage=True, is_last_stage=True, is_replica_leader=rank % tp_size == 0
        )
        for rank in range(ranks)
    ]
    each = ranks // len(actors)
    called = [FakeRank(actors[rank // each], rank, layouts[rank]) for rank in range(ranks)]
    team = RankActors(called)
    before = stored()
    marks = {"start": time.process_time()}
    started = time.perf_counter()
    constraints = PlanConstraints(dp_size=dp_size, tp_size=tp_size, max_tokens=CAP)
    plan = plan_step(batch.lengths.numpy(), constraints, ids=batch.ids.numpy())
    marks["plan"] = time.process_time()
    held = distribute_batch(batch, plan, layouts)
    marks["hand out"] = time.process_time()
    for name in ("old_log_probs", "ref_log_probs"):
        said, made = call_ranks(called, layouts, held, "compute_log_probs", (), name=name)
        team.results(said)
        held = held.with_shards(FieldShards(names=frozenset({name}), objects=made))
    marks["log-probs"] = time.process_time()
    held = with_fields(held, {"advantages": torch.randn(len(batch))}, {"advantages": "sample"})
    said, _ = call_ranks(called, layouts, held, "train_step")
    answers = team.results(said)
    marks["train"] = time.process_time()
    wall, size = time.perf_counter() - started, stored() - before
    assert team.failure is None, team.failure
    assert answers[0]["read"] > 0
    spent = list(marks.values())
    samples = sum(field.nbytes for field in batch.fields.values()) + 2 * 4 * batch.num_tokens + 4 * len(batch)
    return {
        "ranks": ranks,
        "replicas": dp_size,
        "driver_seconds": spent[-1] - spent[0],
        "driver_seconds_by_part": {
            part: end - begin for part, begin, end in zip(list(marks)[1:], spent[:-1], spent[1:], strict=True)
        },
        "wall_seconds": wall,
        "sample_bytes": samples,
        "put_bytes": held.nbytes,
        "stored_bytes": size,
        "stored_share": size / samples,
        "objects_put": 1 + len(held.shards) * dp_size,
        "calls": sum(one.calls for one in called),
        "calls_per_pass_and_rank": sum(one.calls for one in called) / 3 / ranks,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=16384)
    parser.add_argument("--mean", type=int, default=2048, help="mean tokens of a sample")
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--check", action="store_true", help="exit 1 if a figure exceeds its limit")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    given = parser.parse_args()
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["PYTHONPATH"] = os.pathsep.join([sys.path[0], os.environ.get("PYTHONPATH", "")])
    import ray

    batch = rollouts(given.samples, given.mean)
    room = 2 * sum(field.nbytes for field in batch.fields.values()) + 200_000_000
    ray.init("local", num_cpus=ACTORS, object_store_memory=room, include_dashboard=False, logging_level="error")
    actors = [ray.remote(FakeRanks).options(num_cpus=1).remote() for _ in range(ACTORS)]
    ray.get([actor.__ray_ready__.remote() for actor in actors])
    small = rollouts(64, given.mean)
    for tp_size in (8, 1):
        measure(small, given.ranks, tp_size, actors)  # imports and compiles
    runs = [measure(batch, given.ranks, tp_size, actors) for tp_size in (8, 1)]
    growth = [measure(small, ranks, 1, actors) for ranks in (8, 16, 32, 64)]
    ray.shutdown()
    for run in runs:
        parts = ", ".join(f"{part} {seconds:.2f}" for part, seconds in run["driver_seconds_by_part"].items())
        print(f"{run['ranks']} ranks, {run['replicas']} replicas: {len(batch):,} samples, {batch.num_tokens:,} tokens")
        print(f"  driver's processor time   {run['driver_seconds']:.2f} s ({parts}); wall {run['wall_seconds']:.2f} s")
        print(
            f"  bytes in the object store {run['stored_bytes']:,}: {run['stored_share']:.3f} of the samples'"
            f" ({run['put_bytes']:,} put by the driver)"
        )
        print(f"  calls {run['calls']} (3 passes), objects put {run['objects_put']}")
    print("growth with ranks, all of them replicas (ranks: calls, objects):")
    print("  " + "; ".join(f"{one['ranks']}: {one['calls']}, {one['objects_put']}" for one in growth))
    machine = {"python": platform.python_version(), "ray": ray.__version__, "cpus": os.cpu_count()}
    found = {"machine": machine, "runs": runs, "growth": growth}
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    if given.check:
        wrong = [
            f"{run['replicas']} replicas: {what} {value:.3f} > {limit}"
            for run in runs
            for what, value, limit in (
                ("seconds", run["driver_seconds"], SECONDS),
                ("share", run["stored_share"], SHARE),
                ("bytes missing", float(run["stored_bytes"] < run["sample_bytes"]), 0.0),
                ("calls per pass and rank", run["calls_per_pass_and_rank"], 1.0),
            )
            if value > limit
        ]
        sys.exit("; ".join(wrong) or 0)


if __name__ == "__main__":
    main()
