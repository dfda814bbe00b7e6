"""Ranks wait for a silent engine as long as its requests may take, and no longer."""

from __future__ import annotations

import re
import time

import pytest

from roll_batching.jobs.engines.replicas import EngineLimits, Replicas
from roll_batching.jobs.engines.sglang import SGLang
from roll_batching.jobs.engines.vllm import VLLM
from tests.jobs.rl.jobs import settings
from tests.support.ranks import run_ranks

pytestmark = [pytest.mark.cluster, pytest.mark.bad_input]


def test_a_round_takes_as_long_as_all_attempts_of_its_requests():
    limits = EngineLimits(seconds=20, in_flight=4, retries=3)
    for api, requests, check in ((SGLang(), 5, 0), (VLLM(), 6, 30)):  # check: seconds to identify the process
        engine = Replicas(["http://here"], api, limits)
        assert engine.generation_timeout(1) == 30 + 5 * check and engine.generation_timeout(9) == 9 * 30 + 5 * check
        assert engine.update_timeout() == requests * 20 + 2 * check, "to a server that sleeps"


def silent_on_rank_1(payload):
    """On a rank: what is raised, and after how long, when rank 1's engine takes far longer than it may."""
    import torch

    from roll_batching.distributed.parallel_layout import make_layout, start_processes
    from roll_batching.jobs.config import JobConfig
    from roll_batching.jobs.engines import client as engine_client
    from roll_batching.planning import ParallelDims
    from roll_batching.samples import SampleBatch
    from roll_batching.strategy import GenerationSettings

    class Silent(Replicas):
        def generate(self, questions, settings):
            time.sleep(60 * layout.dp_rank)
            return []

    engine_client._MARGIN = 1.0
    layout = make_layout(ParallelDims(dp_size=2), start_processes())
    client = engine_client.EngineClient(JobConfig.model_validate(payload), layout)
    client.engine = Silent(["http://here"], SGLang(), EngineLimits(seconds=0.1, retries=0))
    prompts = SampleBatch.from_lists({"input_ids": [torch.ones(3, dtype=torch.int64)]}, {"input_ids": "token"})
    began = time.monotonic()
    try:
        client.generate(prompts, GenerationSettings(max_new_tokens=2, eos_token_id=0))
    except RuntimeError as error:
        print("after", round(time.monotonic() - began), "s:", error, flush=True)
        raise


@pytest.mark.slow
def test_nobody_waits_longer(tmp_path):
    job = settings(tmp_path, actor_infer__strategy_args__strategy_name="sglang", warmup=None)
    job["actor_infer"]["engine_args"] = {"urls": ["http://here"]}
    outcomes = run_ranks(2, "tests.jobs.engines.test_patience:silent_on_rank_1", job, check=False, timeout=55, grace=1)
    found = re.search(r"after (\d+) s: .*ank 1", outcomes[0].output)
    assert found and 10 <= int(found[1]) < 50, outcomes[0].output
