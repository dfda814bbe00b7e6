"""Times of steps whose rollouts run free, against what nothing but the rollouts' own delays would take."""

from __future__ import annotations

import asyncio
import heapq
import json
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("aiohttp")

from roll_batching.jobs.observe.run_files import read_metrics
from roll_batching.jobs.rollouts import RolloutSample
from roll_batching.jobs.seeds import rollout_function_seed, step_seed
from tests.huggingface.test_job import job
from tests.jobs.engines.test_replicas import start
from tests.support.ranks import run_ranks

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

PROMPTS, GROUP, SEED = 16, 4, 3
LIMIT = 0.05


def delay_of(seed: int, scale: float, slowest: float) -> float:
    """Seconds of a rollout's tools: log-normal with a median of `scale`; one in 64 takes `slowest`."""
    rng = np.random.default_rng(seed)
    return slowest if rng.random() < 1 / 64 else min(slowest, float(scale * rng.lognormal(0.0, 0.6)))


async def waits(prompt, client, tokenizer, scale, slowest, log):
    """Two turns, before which tools take half of the delay each."""
    began, half = time.time(), delay_of(prompt.seed, scale, slowest) / 2
    await asyncio.sleep(half)
    first = await client.generate(prompt.tokens, max_new_tokens=1)
    await asyncio.sleep(half)
    second = await client.generate(prompt.tokens + first.tokens, max_new_tokens=1)
    tokens = first.tokens + second.tokens
    with Path(log).open("a") as file:
        file.write(json.dumps([prompt.seed, began, time.time()]) + "\n")
    return RolloutSample(
        tokens=tokens, loss_mask=[1] * 2, log_probs=first.log_probs + second.log_probs, reward=sum(tokens) % 5
    )


@pytest.fixture
def rows_of(folder):
    """Runs a job with these delays; returns its rows, and of each rollout, by its seed, when it began and ended."""
    process, urls = start(folder / "model", "--replicas", "2")

    def run(scale, slowest, **changes):
        arguments = {"scale": scale, "slowest": slowest, "log": str(folder / "log")}
        made = job(
            folder,
            rollout_function=f"{__name__}:waits",
            rollout_args=arguments,
            rollout_batch_size=PROMPTS,
            num_return_sequences_in_group=GROUP,
            seed=SEED,
            warmup=None,
            eval_samples=0,
            actor_infer={"strategy_args": {"strategy_name": "sglang"}, "engine_args": {"urls": urls}},
            **changes,
        )
        del made["reward_function"]
        run_ranks(1, "tests.jobs.rl.jobs:run", made)
        lines = [json.loads(line) for line in (folder / "log").read_text().splitlines()]
        rows = read_metrics(folder / "runs" / "tiny" / "metrics.jsonl")
        return rows, {seed: (began, ended) for seed, began, ended in lines}

    yield run
    process.kill()


def test_a_synchronous_step_takes_as_long_as_its_slowest_rollout(rows_of, report):
    """64 rollouts in a step; in the first one of them takes 20 times as long as the others."""
    rows, times = rows_of(1.0, 20.0, max_steps=2)
    for step, row in enumerate(rows, 1):
        seeds = [rollout_function_seed(step_seed(SEED, step), sample) for sample in range(PROMPTS * GROUP)]
        slowest = max(delay_of(seed, 1.0, 20.0) for seed in seeds)
        together = max(times[seed][1] for seed in seeds) - min(times[seed][0] for seed in seeds)
        report(f"step {step}: {together:.2f} s, its slowest rollout waits {slowest:.2f} s")
        assert slowest <= together < (1 + LIMIT) * slowest
        assert together < row["rollout_seconds"] < together + 5, "the rest is the update of weights"


def test_asynchronous_steps_take_what_their_delays_allow(rows_of, report):
    """Simulated: a step ends when 16 of 32 groups are complete; then it trains, and 16 others begin."""
    steps = 6
    rows, times = rows_of(
        *(1.5, 30.0), max_steps=steps, async_generation_ratio=1, in_flight_updates=True, partial_rollout=True
    )
    begin = min(began for began, _ in times.values())
    now, under_way, sent, ends = 0.0, list[float](), 0, []
    for step, row in enumerate(rows):
        while sent < min(PROMPTS * (step + 2), PROMPTS * steps):
            batch, part = divmod(sent, PROMPTS)
            seed = step_seed(SEED, batch + 1, part)
            delays = [delay_of(rollout_function_seed(seed, sample), 1.5, 30.0) for sample in range(GROUP)]
            heapq.heappush(under_way, now + max(delays))
            sent += 1
        now = max(now, max(heapq.heappop(under_way) for _ in range(PROMPTS)))
        now += row["seconds"] - row["rollout_seconds"]
        ends.append(now)
    measured = max(ended for _, ended in times.values()) - begin
    waits_of_steps = [round(row["queue_wait_seconds"], 1) for row in rows]
    report(f"{steps} steps end after {measured:.1f} s, simulated {ends[-1]:.1f} s; training waits {waits_of_steps}")
    assert measured == pytest.approx(ends[-1], rel=LIMIT)
