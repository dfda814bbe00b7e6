"""Weights that change while an engine samples, and steps that do not wait for slow rollouts."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("aiohttp")

from roll_batching.errors import DataError
from roll_batching.jobs.engines.protocol import SampledTokens
from roll_batching.jobs.engines.replicas import EngineLimits, Replicas
from roll_batching.jobs.observe.run_files import read_metrics
from roll_batching.jobs.rl.async_rollouts import Arrivals, fresh_tokens
from roll_batching.jobs.rollouts.contract import LoadedRolloutFunction, RolloutPrompt, RolloutSample
from roll_batching.jobs.rollouts.free_rollouts import FreeRollouts
from roll_batching.jobs.rollouts.token_versions import VERSIONS_SPEC, WEIGHT_VERSIONS, TokenVersions
from roll_batching.jobs.texts.tokenizers import CharTokenizer
from roll_batching.samples import FieldSpec, SampleBatch
from roll_batching.strategy.sampling import GenerationSettings
from tests.huggingface import tiny
from tests.huggingface.test_job import job
from tests.jobs.engines.test_replicas import DIALECTS, order, seen, start
from tests.jobs.rollouts.rollout_functions import slow_for, three_turns
from tests.support.ranks import run_ranks
from tests.support.tiny_job import VOCABULARY

pytestmark = pytest.mark.cluster

RUN = "tests.jobs.rl.jobs:run"
TOKENIZER = CharTokenizer(VOCABULARY + "ABCDEFGHIJKLMNOPQRSTU", eos="$", pad=".")
SETTINGS = GenerationSettings(
    max_new_tokens=24, eos_token_id=TOKENIZER.eos_token_id, stop_token_ids=(5,), temperature=1.3
)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Three model directories of one architecture, and their models."""
    home = tmp_path_factory.mktemp("in_flight")
    made = []
    for name in ("first", "second one", "third model"):
        made.append((home / name.split()[0], tiny.write_model(home / name.split()[0], name, model=("Qwen2", {}))))
    return made


@pytest.fixture(params=["sglang", "vllm"])
def servers(request, models):
    process, urls = start(models[0][0], "--kind", request.param, *OPTIONS)
    yield DIALECTS[request.param], urls
    process.kill()


OPTIONS = ("--replicas", "2", "--processed", "--token-seconds", "0.04")


def prompts(count=8):
    return [
        RolloutPrompt(tokens=TOKENIZER.encode(f"a+{i}="), text=f"a+{i}=", record={"level": i}, sample=i, seed=i)
        for i in range(count)
    ]


def function_of(function, length=64, **arguments):
    return LoadedRolloutFunction(
        path=function.__name__,
        function=function,
        arguments=arguments,
        timeout=20,
        max_calls=9,
        sequence_length=length,
        has_reward=False,
        needs_versions=True,
    )


async def one_answer(prompt, client, tokenizer, tokens=24):
    made = await client.generate(prompt.tokens, max_new_tokens=tokens)
    return RolloutSample(tokens=made.tokens, loss_mask=[1] * len(made.tokens), log_probs=made.log_probs, reward=0)


def gap(model, sample, chosen, temperature=SETTINGS.temperature):
    """The largest difference of the log-probs of a sample's `chosen` tokens to transformers' model."""
    whole = torch.tensor(np.concatenate([sample.prompt, sample.tokens])[None])
    with torch.no_grad():
        rows = (model(whole).logits[0].double() / temperature).log_softmax(-1)
    own = rows[len(sample.prompt) - 1 : -1].gather(1, torch.tensor(sample.tokens)[:, None])[:, 0]
    return float((own - torch.tensor(sample.log_probs))[torch.tensor(chosen)].abs().max())


def complete(free, count):
    """The rollouts of `count` requests, by number."""
    found, until = {}, time.monotonic() + 60
    while len(found) < count and time.monotonic() < until:
        if (one := free.wait(1.0)) is not None:
            found[one.number] = one.rollouts
    assert len(found) == count
    return found


def test_each_token_is_of_the_weights_that_its_version_says(servers, models, report):
    """Two updates while 8 rollouts of several turns are under way on two servers."""
    api, urls = servers
    engine = Replicas(urls, api, EngineLimits(seconds=20, in_flight=3, retries=1))
    engine.update_weights(models[0][0].resolve(), 0)
    with FreeRollouts(engine, function_of(three_turns, pause=1.0), TOKENIZER, SETTINGS) as free:
        free.start(0, prompts()[:4], seed=7)
        free.start(1, prompts()[4:], seed=8)
        for version in (1, 2):
            time.sleep(0.35)
            with free.interrupted():
                engine.update_weights(models[version][0].resolve(), version)
        found = complete(free, 2)
    samples = [rollout.samples[0] for number in (0, 1) for rollout in found[number]]
    assert all((sample.versions[~sample.mask] == -1).all() for sample in samples)
    assert all((np.diff(sample.versions[sample.mask]) >= 0).all() for sample in samples)
    assert {version for sample in samples for version in sample.versions[sample.mask].tolist()} == {0, 1, 2}
    mixed = [sample for sample in samples if len(set(sample.versions[sample.mask].tolist())) > 1]
    assert mixed
    right, wrong = [], []
    for sample in samples:
        for version, (_, model) in enumerate(models):
            if (chosen := sample.versions == version).any():
                right.append(gap(model, sample, chosen))
                wrong.append(gap(models[version - 1][1], sample, chosen))
    report(f"{api.name}: {len(mixed)} of {len(samples)} rollouts of several weights, log-probs within {max(right):.1e}")
    assert max(right) < 1e-5 and np.median(wrong) > 0.1, "other versions would be noticed"
    assert engine.metrics()["engine_failed_attempts"] == 0


def test_long_answers_are_cut_at_the_update_and_go_on(servers, models, report):
    """One call of 24 tokens each: its parts together are as long as it would be, and nothing is sampled twice."""
    api, urls = servers
    engine = Replicas(urls, api, EngineLimits(seconds=20, in_flight=8, retries=1))
    engine.update_weights(models[0][0].resolve(), 0)
    with FreeRollouts(engine, function_of(one_answer), TOKENIZER, SETTINGS) as free:
        free.start(0, prompts(), seed=7)
        time.sleep(0.5)
        with free.interrupted():
            engine.update_weights(models[1][0].resolve(), 1)
        (rollouts,) = complete(free, 1).values()
    samples = [rollout.samples[0] for rollout in rollouts]
    long = [sample for sample in samples if len(set(sample.versions.tolist())) == 2]
    assert len(long) >= 4 and all(len(sample.tokens) == 24 or sample.finished for sample in samples)
    for sample in long:
        before = int((sample.versions == 0).sum())
        assert gap(models[0][1], sample, sample.versions == 0) < 1e-5
        assert gap(models[1][1], sample, sample.versions == 1) < 1e-5
        assert 0 < before < len(sample.tokens)
    sent = [row for url in urls for row in seen(url)["prompts"]]
    assert max(len(row) for row in sent) > 4 + 4, "what was sampled is a part of the next request"
    report(f"{api.name}: {len(long)} answers cut at {sorted(int((s.versions == 0).sum()) for s in long)} tokens")


def test_what_a_restarted_server_sampled_before_an_update_is_sampled_again(models):
    """vLLM's replies do not say whose weights they are of, and after the update the server has the right ones."""
    process, urls = start(models[0][0], "--kind", "vllm", *OPTIONS)
    try:
        engine = Replicas(urls, DIALECTS["vllm"], EngineLimits(seconds=20, in_flight=8, retries=1))
        engine.update_weights(models[1][0].resolve(), 0)
        with FreeRollouts(engine, function_of(three_turns, pause=1.0), TOKENIZER, SETTINGS) as free:
            free.start(0, prompts()[:1], seed=1)
            complete(free, 1)  # it is open, and has seen both servers
            order(urls[0], "restart")
            free.start(1, prompts(), seed=7)
            time.sleep(0.4)
            with free.interrupted():
                engine.update_weights(models[2][0].resolve(), 1)
            (rollouts,) = complete(free, 1).values()
    finally:
        process.kill()
    samples = [rollout.samples[0] for rollout in rollouts]
    for sample in samples:
        for version, model in ((0, models[1][1]), (1, models[2][1])):
            if (chosen := sample.versions == version).any():
                assert gap(model, sample, chosen) < 1e-5
    whole = [set(sample.versions[sample.mask].tolist()) for sample in samples]
    assert {1} in whole and {0, 1} in whole, "those of the other server keep their tokens"


@pytest.mark.parametrize("fault", ["restarted", "dropped"])
def test_rollouts_learn_that_a_server_is_another_when_they_return(models, fault):
    """During an update, which has its new process already; or after another thread has dropped it."""
    process, urls = start(models[0][0], "--kind", "vllm", *OPTIONS)
    slept = threading.Event()

    async def slow_at_the_end(prompt, client, tokenizer):
        sample = await one_answer(prompt, client, tokenizer, tokens=3)
        await asyncio.to_thread(slept.wait, 2.0)
        return sample

    try:
        engine = Replicas(urls, DIALECTS["vllm"], EngineLimits(seconds=20, in_flight=8, retries=1))
        engine.update_weights(models[1][0].resolve(), 0)
        with FreeRollouts(engine, function_of(slow_at_the_end), TOKENIZER, SETTINGS) as free:
            slept.set()
            free.start(0, prompts()[:1], seed=1)
            complete(free, 1)
            slept.clear()
            order(urls[0], "restart")
            free.start(1, prompts(), seed=7)
            time.sleep(1.0)
            if fault == "dropped":
                engine.drop({urls[0]: "as an evaluation does"}, "", "")
                slept.set()
            else:
                with free.interrupted():
                    engine.update_weights(models[2][0].resolve(), 1)
                    slept.set()
                    time.sleep(1.0)
            (rollouts,) = complete(free, 1).values()
    finally:
        process.kill()
    samples = [rollout.samples[0] for rollout in rollouts]
    versions = {version for sample in samples for version in sample.versions.tolist()}
    assert versions == ({0, 1} if fault == "restarted" else {0})
    for sample in samples:
        assert gap(models[1 + int(sample.versions[0])][1], sample, sample.mask) < 1e-5


# ---- steps


def test_versions_are_found_by_token_and_log_prob():
    """Equal pairs are taken in the order of the calls; what the client did not sample counts as the oldest."""
    versions = TokenVersions()
    assert not versions
    versions.add(SampledTokens(tokens=[7, 8, 7], log_probs=[0.0, -1.0, 0.0], versions=[3, 3, 3]))
    versions.add(SampledTokens(tokens=[7, 9], log_probs=[0.0, -1.0], versions=[4, 5]))
    assert versions
    tokens, mask = np.array([7, 8, 7, 1, 7, 9, 9]), np.array([1, 1, 1, 0, 1, 1, 1], dtype=bool)
    log_probs = np.array([0.0, -1.0, 0.0, 0.0, 0.0, -1.0, -2.0])
    assert versions.take(tokens, mask, log_probs).tolist() == [3, 3, 3, -1, 4, 5, 3]


def test_a_step_takes_what_comes_first_and_nothing_twice():
    arrivals = Arrivals(4)
    assert arrivals.add([1, 2, 3, 5]) == 0 and arrivals.state_dict() == {"parts": 4, "first": 0, "taken": [1, 2, 3, 5]}
    again = Arrivals(4)
    again.load_state_dict(arrivals.state_dict())
    assert again.add([4, 6, 7, 8]) == 0 and again.add([0]) == 2, "the slow one was the last of two batches"
    assert again.state_dict() == {"parts": 4, "first": 8, "taken": [8]}
    with pytest.raises(DataError, match="with rollout_batch_size 4, and it is 3 now"):
        Arrivals(3).load_state_dict(arrivals.state_dict())


def test_old_tokens_are_counted_and_masked():
    schema = {"response_mask": FieldSpec("token"), WEIGHT_VERSIONS: VERSIONS_SPEC}
    rows = {
        "response_mask": [torch.tensor([0, 1, 1, 1]).bool(), torch.tensor([0, 1]).bool()],
        WEIGHT_VERSIONS: [torch.tensor([-1, 3, 4, 6]), torch.tensor([-1, 5])],
    }
    batch = SampleBatch.from_lists(rows, schema)
    whole, metrics = fresh_tokens(batch, 6, None)
    assert whole["response_mask"].tolist() == batch["response_mask"].tolist() and WEIGHT_VERSIONS not in whole.schema
    assert metrics == {"staleness_mean": 1.5, "staleness_max": 3, "weight_versions_mean": 2.0}
    part, metrics = fresh_tokens(batch, 6, 1)
    assert part["response_mask"].tolist() == [False, False, False, True, False, True]
    assert metrics["stale_tokens"] == 0.5
    with pytest.raises(DataError, match="all tokens of a step are older than max_staleness=1, the freshest by 3"):
        fresh_tokens(batch, 9, 1)


def prompts_of(folder):
    """Of every step the prompts of its samples, and how often each was trained on."""
    lines = [json.loads(line) for line in (folder / "runs" / "tiny" / "rollouts.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["kind"] == "train"]
    return Counter(line["prompt"] for line in lines), Counter(line["step"] for line in lines)


async def suffers(prompt, client, tokenizer, folder, fault, url, text, seconds):
    """`slow_for`; at its 30th call its process is killed, or the server is started again."""
    calls = Path(folder) / "calls"
    with calls.open("a") as file:
        file.write(".")
    if calls.stat().st_size == 30:
        if fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        order(url, "restart")
    return await slow_for(prompt, client, tokenizer, text, seconds)


def free_job(folder, kind, urls, function, arguments):
    changes = {
        "rollout_function": function,
        "rollout_args": arguments,
        "async_generation_ratio": 1,
        "in_flight_updates": True,
        "partial_rollout": True,
        "max_steps": 6,
        "save_steps": 1,
        "warmup": None,
        "eval_samples": 0,
        "rollout_samples": -1,
        "actor_infer": {"strategy_args": {"strategy_name": kind}, "engine_args": {"urls": urls}},
    }
    made = job(folder, **changes)
    del made["reward_function"]
    return made


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_steps_do_not_wait_for_a_slow_rollout(folder, kind, report):
    """One prompt of eight takes 6 s: steps go on without it, and train on it once. So does a run that is resumed."""
    process, urls = start(folder / "model", "--kind", kind, *OPTIONS)
    function = "tests.jobs.rollouts.rollout_functions:slow_for"
    made = free_job(folder, kind, urls, function, {"text": "a+2b+2=", "seconds": 6.0})
    made |= {"eval_samples": 4, "eval_steps": 2}
    try:
        run_ranks(2, RUN, made)
        rows = read_metrics(folder / "runs" / "tiny" / "metrics.jsonl")
        prompts, steps = prompts_of(folder)
        saved = folder / "runs" / "tiny" / "checkpoints" / "rl-000002"
        run_ranks(2, RUN, made | {"resume_from_checkpoint": str(saved)})
        again = prompts_of(folder)
    finally:
        process.kill()
    waits = [row["queue_wait_seconds"] for row in rows]
    versions = [round(row["weight_versions_mean"], 2) for row in rows]
    # The first wait has the start of the sampler in it, the last one the slow prompt.
    report(f"{kind}: waiting {[round(wait, 1) for wait in waits]} s, versions of a sample {versions}")
    assert prompts == {prompt: 9 for prompt in prompts} and len(prompts) == 8, "three epochs of groups of three"
    assert steps == {step: 12 for step in range(1, 7)} and again == (prompts, steps)
    assert max(waits[1:5]) < 3 and max(row["weight_versions_mean"] for row in rows) > 1
    assert [row["eval_updates"] for row in rows if "eval_reward" in row] == [0, 2, 4, 6]
    assert max(row["staleness_max"] for row in rows) >= 2 and all(row["grad_norm"] > 0 for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "fault"), [("sglang", "killed"), ("vllm", "killed"), ("vllm", "restarted")])
def test_no_rollout_is_lost_or_trained_on_twice(folder, kind, fault, report):
    """The sampler dies while rollouts are under way and some have been trained on; or a server loses its weights."""
    process, urls = start(folder / "model", "--kind", kind, *OPTIONS)
    function = "tests.jobs.engines.test_in_flight:suffers"
    arguments = {"folder": str(folder), "fault": fault, "url": urls[0], "text": "a+2b+2=", "seconds": 3.0}
    try:
        run_ranks(2 if kind == "sglang" else 1, RUN, free_job(folder, kind, urls, function, arguments))
    finally:
        process.kill()
    prompts, steps = prompts_of(folder)
    rows = read_metrics(folder / "runs" / "tiny" / "metrics.jsonl")
    calls = (folder / "calls").stat().st_size
    report(f"{kind}, {fault}: restarts of the sampler {rows[-1]['sampler_restarts']}, calls {calls}")
    assert prompts == {prompt: 9 for prompt in prompts} and len(prompts) == 8
    assert steps == {step: 12 for step in range(1, 7)}
    assert rows[-1]["sampler_restarts"] == (fault == "killed")
    if fault == "restarted":
        assert sum(row["engine_dropped"] for row in rows) >= 1 and calls > 72


@pytest.mark.slow
def test_answers_of_one_turn_go_on_in_the_order_of_their_prompts(folder, report):
    """Without a rollout function and without partial rollouts, as NeMo-RL's files are; old tokens are skipped."""
    process, urls = start(folder / "model", "--kind", "vllm", *OPTIONS)
    made = free_job(folder, "vllm", urls, None, {})
    made |= {"partial_rollout": False, "max_staleness": 0, "reward_function": "tests.jobs.rl.jobs:length"}
    made["actor_infer"]["engine_args"]["max_in_flight"] = 2  # slower than training, so that updates come meanwhile
    del made["rollout_function"], made["rollout_args"]
    try:
        run_ranks(1, RUN, made)
    finally:
        process.kill()
    rows = read_metrics(folder / "runs" / "tiny" / "metrics.jsonl")
    report(f"stale tokens {[round(row['stale_tokens'], 2) for row in rows]}")
    prompts, steps = prompts_of(folder)
    assert prompts == {prompt: 9 for prompt in prompts} and steps == {step: 12 for step in range(1, 7)}
    assert all(row["staleness_max"] <= 1 for row in rows) and any(row["weight_versions_mean"] > 1 for row in rows)
    assert rows[0]["stale_tokens"] == 0 < max(row["stale_tokens"] for row in rows)
