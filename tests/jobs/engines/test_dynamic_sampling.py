"""Dynamic sampling with an engine: steps are full, though a server dies, and a resumed run is the same."""

from __future__ import annotations

from typing import Any

import pytest

from roll_batching.jobs.config import config_from_dict
from roll_batching.jobs.inputs import load_inputs
from roll_batching.jobs.texts.epochs import epoch_order
from tests.huggingface.test_job import job
from tests.jobs.engines.test_replicas import order, seen, start
from tests.jobs.rl.test_dynamic_sampling import BASE, RUN, is_hopeless, rows_of, trained
from tests.support.ranks import run_ranks

pytest.importorskip("aiohttp")
pytestmark = pytest.mark.cluster


def job_of(folder: Any, **changes: Any) -> dict[str, Any]:
    own = {key: value for key, value in BASE.items() if key != "reward_function"}
    return job(folder, **(own | changes)) | {"reward_function": BASE["reward_function"]}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_engine_is_asked_until_the_step_is_full(folder, ranks):
    """One of two servers dies in the first step. Prompts are those of the rule, in order."""
    server, urls = start(folder / "model", "--replicas", "2")
    engine = {"strategy_args": {"strategy_name": "sglang"}, "engine_args": {"urls": urls}}

    def run(name: str, **changes: Any) -> None:
        payload = job_of(folder, exp_name=name, actor_infer=engine, save_steps=1, **changes)
        run_ranks(ranks, RUN, payload, timeout=400)

    try:
        order(urls[1], "dies")
        run("engine")
        asked = seen(urls[0])["requests"]
        run("engine", resume_from_checkpoint=str(folder / "runs" / "engine" / "checkpoints" / "rl-000001"))
    finally:
        server.kill()
    steps, rows = trained(folder, "engine"), rows_of(folder, "engine")
    assert [row["step"] for row in rows] == [1, 2, 3] and [len(steps[step]) for step in (1, 2, 3)] == [12] * 3
    prompts = [line["prompt"] for step in (1, 2, 3) for line in sorted(steps[step], key=lambda line: line["id"])][::3]
    assert prompts == expected(folder, rows)
    assert all(row["dynamic_sampling/surplus_groups"] >= 0 and row["grad_norm"] > 0 for row in rows)
    assert max(row["dynamic_sampling/batches"] for row in rows) > 1 and asked > 3 * 12


def expected(folder: Any, rows: list[dict[str, Any]]) -> list[str]:
    """Prompts of the steps by the rule alone: the first four of each step's batches that are not hopeless."""
    config = config_from_dict(job_of(folder))
    prompts = load_inputs(config).prompts
    drawn = [prompts[i].prompt for epoch in range(99) for i in epoch_order(len(prompts), config.seed, epoch)]
    result: list[str] = []
    for row in rows:
        count = 4 * int(row["dynamic_sampling/batches"])
        result += [prompt for prompt in drawn[:count] if not is_hopeless(prompt)][:4]
        drawn = drawn[count:]
    return result
