"""Asynchronous rollouts by an engine equal those of a synchronous run, also when the sampler process is killed."""

from __future__ import annotations

import re
import signal

import pytest

from tests.huggingface.test_job import job
from tests.jobs.engines.test_replicas import seen, start
from tests.jobs.rl.test_async_rollouts import RUN, rows_of, trained_on
from tests.support.ranks import run_ranks

pytest.importorskip("aiohttp")
pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def test_an_engine_ahead_draws_what_it_draws_in_step_though_its_asker_is_killed(folder, report):
    """With constant weights: every prompt once, in order, with the same responses; servers get each version."""
    server, urls = start(folder / "model")
    engine = {"strategy_args": {"strategy_name": "sglang"}, "engine_args": {"urls": urls}}
    fixed = {"actor_train__training_args__learning_rate": 1e-12, "max_steps": 4, "actor_infer": engine}
    fixed |= {"warmup": None, "eval_samples": 0, "rollout_samples": -1}
    killing = {
        "reward_function": "tests.jobs.rl.test_async_rollouts:signals_the_sampler",
        "reward_args": {"folder": str(folder), "after": 18, "number": int(signal.SIGKILL)},
    }
    try:
        run_ranks(1, RUN, job(folder, exp_name="sync", **fixed))
        in_step = seen(urls[0])
        ahead = job(folder, async_generation_ratio=1, **fixed) | killing
        outcome = run_ranks(1, RUN, ahead, check=False, timeout=400)[0]
        told = seen(urls[0])
    finally:
        server.kill()
    assert outcome.returncode == 0, outcome.output
    assert re.search(r"started again \(1 of 2\), and asked again for (4|8) prompts", outcome.output), outcome.output
    assert trained_on(folder) == trained_on(folder, "sync") and len(trained_on(folder)) == 4
    rows = rows_of(folder)
    assert [row["reward"] for row in rows] == [row["reward"] for row in rows_of(folder, "sync")]
    assert [row["sampler_restarts"] for row in rows] == [0, 1, 1, 1] and all(row["staleness_max"] <= 1 for row in rows)
    # The engine's own log-probs stand in the ratio.
    assert all(row["ratio_max"] == pytest.approx(1, abs=1e-3) and row["ratio_max"] != 1 for row in rows)
    assert sum(row["engine_requests"] for row in rows) == 48 == in_step["requests"]
    assert int(told["version"]) >= 2 and told["updates"] > in_step["updates"]
    assert not (folder / "runs" / "tiny" / "engine_weights").exists()
    report(f"an engine ahead of training: staleness {[row['staleness_max'] for row in rows]}, its asker killed once")
