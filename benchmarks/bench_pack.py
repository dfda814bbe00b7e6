"""Host time before the first micro-batch of an optimizer step, for which the device waits.

    python benchmarks/bench_pack.py                 one rank with all samples
    python benchmarks/bench_pack.py --replica       with the digest that ranks of a replica compare

Times are processor time of this process. The samples are those of a long RL step: 256 samples, 2.2 million tokens, six
fields.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs in a checkout that is not installed

from roll_batching.known_warnings import hide_known_warnings

hide_known_warnings()  # before Megatron is imported, here and in the ranks

from roll_batching.losses.denominators import local_counts
from roll_batching.packing import StepPacks
from roll_batching.planning import PlanConstraints, plan_step
from roll_batching.samples import SampleBatch
from roll_batching.samples.flatten import content_digest

MASKS = ("response_mask",)


def step_batch(samples: int, cap: int) -> SampleBatch:
    """Samples with the fields of a policy loss."""
    r = np.random.default_rng(0)
    lengths = torch.from_numpy(r.lognormal(np.log(6000), 0.9, samples).clip(64, cap).astype(np.int64))
    draw = torch.Generator().manual_seed(0)
    count = int(lengths.sum())
    fields: dict[str, Any] = {
        "input_ids": torch.randint(0, 150_000, (count,), generator=draw),
        "response_mask": torch.rand(count, generator=draw) < 0.8,
        "advantages": torch.randn(samples, generator=draw),
    }
    kinds = {"input_ids": "token", "response_mask": "token", "advantages": "sample"}
    for name in ("old_log_probs", "ref_log_probs", "rollout_log_probs"):
        fields[name], kinds[name] = torch.randn(count, generator=draw), "next_token"
    return SampleBatch(torch.arange(samples), lengths, fields, kinds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--cap", type=int, default=32768)
    parser.add_argument("--replica", action="store_true", help="with tensor, context or pipeline parallelism")
    given = parser.parse_args()
    torch.set_num_threads(1)
    batch = step_batch(given.samples, given.cap)
    plan = plan_step(batch.lengths.numpy(), PlanConstraints(dp_size=1, max_tokens=given.cap))
    spent: dict[str, list[float]] = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        before = time.process_time()
        result = work()
        spent.setdefault(name, []).append(time.process_time() - before)
        return result

    def packs() -> StepPacks:
        return StepPacks(batch, plan, dp_rank=0, device=torch.device("cpu"), masks=MASKS)

    for _ in range(5):
        timed("counting", lambda: local_counts(batch, MASKS, rows=batch.rows_of(plan.ids[plan.rank_samples(0)])))
        timed("the plan's fingerprint", lambda: plan.fingerprint)
        if given.replica:
            timed("digest of the samples", lambda: content_digest(batch.ids, batch.lengths, batch.fields))
        made = timed("checks and the first pack", packs)
    before = sum(float(np.median(times)) for times in spent.values())
    timed("every pack, one ahead of the device", lambda: list(made))
    print(f"{given.samples} samples, {batch.num_tokens:,} tokens, {len(made)} packs of up to {given.cap:,}")
    for name, times in spent.items():
        print(f"  {name:36} {1000 * float(np.median(times)):7.1f} ms")
    print(f"  {'before the first micro-batch':36} {1000 * before:7.1f} ms")


if __name__ == "__main__":
    main()
