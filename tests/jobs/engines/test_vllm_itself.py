"""Our client against vLLM's own server on a CPU: log-probs, seeds, weight updates, interruptions, and jobs.

`scripts/engine_environment.sh` makes the environment; without it these tests are skipped.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("aiohttp")

from roll_batching.errors import EngineError
from roll_batching.jobs.engines.protocol import GenerationRequest, GenerationResult
from roll_batching.jobs.engines.replicas import EngineLimits, Replicas
from roll_batching.jobs.engines.vllm import VLLM
from roll_batching.jobs.observe.run_files import read_metrics
from roll_batching.jobs.rollouts.contract import RolloutPrompt
from roll_batching.jobs.rollouts.free_rollouts import FreeRollouts
from roll_batching.strategy.sampling import GenerationSettings
from tests.huggingface import tiny
from tests.huggingface.test_job import job
from tests.jobs.engines.test_in_flight import TOKENIZER, complete, function_of, one_answer
from tests.jobs.engines.test_in_flight import gap as gap_of
from tests.jobs.rl.jobs import write_data
from tests.support.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = ROOT / ".venv-engines" / "bin" / "vllm"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.engines,
    pytest.mark.skipif(not PROGRAM.exists(), reason="needs .venv-engines: ./scripts/engine_environment.sh"),
]

QWEN2 = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 160}
"""Heads of 64 channels: vLLM's attention on CPUs takes no smaller ones."""
SETTINGS = GenerationSettings(max_new_tokens=24, eos_token_id=41, stop_token_ids=(5,), temperature=1.3)
"""The end tokens of tiny.write_tokenizer and of tiny.write_model."""
STARTS = 300.0
"""Seconds in which a server starts."""


class Server:
    """A process of `vllm serve`."""

    def __init__(self, folder: Path, log: Path, dtype: str = "float32") -> None:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        self.url, self.log = f"http://127.0.0.1:{port}", log
        command = [PROGRAM, "serve", folder, "--dtype", dtype, "--enforce-eager", "--port", str(port)]
        environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_SERVER_DEV_MODE": "1"}
        with log.open("w") as output:
            # A chunk of a prompt under a request's seed ends vLLM 0.32 on a CPU, whose generators have no offset.
            self.process = subprocess.Popen(
                [*map(str, command), "--logprobs-mode", "processed_logprobs", "--no-enable-chunked-prefill"],
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
            )

    def wait(self) -> Server:
        """Waits until it answers."""
        until = time.monotonic() + STARTS
        while time.monotonic() < until:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return self
            time.sleep(0.5)
        raise AssertionError(self.log.read_text()[-3000:])

    def post(self, path: str) -> None:
        urllib.request.urlopen(urllib.request.Request(f"{self.url}{path}", data=b"", method="POST")).read()

    def kill(self) -> None:
        """Ends the server and its engine at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, 9)
        self.process.wait()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, Any]]:
    """Two model directories of one architecture, and their models by transformers."""
    home = tmp_path_factory.mktemp("vllm")
    made = []
    for name in ("first", "second one"):
        made.append((home / name.split()[0], tiny.write_model(home / name.split()[0], name, model=("Qwen2", QWEN2))))
        tiny.write_tokenizer(home / name.split()[0])
    return made


@pytest.fixture(scope="module")
def servers(models: list[tuple[Path, Any]]) -> Iterator[list[Server]]:
    """Two servers of the first model."""
    made = [Server(models[0][0], models[0][0].parent / f"server{number}.log") for number in range(2)]
    try:
        yield [server.wait() for server in made]
    finally:
        for server in made:
            server.kill()


def engine(*urls: str, retries: int = 3) -> Replicas:
    return Replicas(urls, VLLM(), EngineLimits(seconds=60, in_flight=64, retries=retries))


def questions(groups: int = 16, members: int = 4) -> list[GenerationRequest]:
    rows = [row.tolist() for row in tiny.rows()]
    return [
        GenerationRequest(tokens=rows[group % len(rows)], seed=100 * group + member, group=group)
        for group in range(groups)
        for member in range(members)
    ]


def gap(model: Any, asked: list[GenerationRequest], results: list[GenerationResult]) -> float:
    """The largest difference of log-probs to transformers' model."""
    largest = 0.0
    for request, result in zip(asked, results, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([request.tokens + result.tokens])).logits[0].double() / SETTINGS.temperature
        own = logits.log_softmax(-1)[len(request.tokens) - 1 : -1]
        own = own.gather(1, torch.tensor(result.tokens)[:, None])[:, 0]
        largest = max(largest, float((own - torch.tensor(result.log_probs)).abs().max()))
    return largest


def while_in_flight(ask: Callable[[], Any], disturb: Callable[[], None]) -> Any:
    """The result of `ask`, during which `disturb` is called."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(ask())
        except EngineError as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    time.sleep(0.3)
    disturb()
    thread.join(120)
    return found[0]


def test_log_probs_are_the_models_after_every_update(models, servers, report):
    """64 requests in flight; the same seeds give the same tokens, and those of stale weights would be noticed."""
    client, asked = engine(servers[0].url), questions()
    found = []
    for version, (folder, model) in enumerate([*models, models[0]]):
        client.update_weights(folder.resolve(), version)
        results = client.generate(asked, SETTINGS)
        assert client.generate(asked, SETTINGS) == results
        found.append(gap(model, asked, results))
        other = models[version % 2 == 0][1]
        assert gap(other, asked, results) > 0.5, "a gap of the other weights is seen"
    report(f"log-probs against transformers, fp32: {max(found):.1e}")
    assert max(found) < 5e-5
    assert client.metrics()["engine_failed_attempts"] == 0


def test_requests_that_are_interrupted_are_answered_again(models, servers):
    """Paused and resumed while 256 requests are in flight: those that it aborts are sent again, with their seeds."""
    client, asked = engine(servers[0].url), questions(64)
    client.update_weights(models[0][0].resolve(), 1)
    expected = client.generate(asked, SETTINGS)
    client.metrics()

    def pause() -> None:
        servers[0].post("/pause?mode=abort")
        time.sleep(1)
        servers[0].post("/resume")

    found = while_in_flight(lambda: client.generate(asked, SETTINGS), pause)
    assert [one.tokens for one in found] == [one.tokens for one in expected]
    assert client.metrics()["engine_requests"] >= 256


def test_it_goes_on_with_new_weights_while_requests_run(models, servers, report):
    """Three updates while 256 answers are under way: each token is of the weights that its version says."""
    client = engine(*(server.url for server in servers))
    client.update_weights(models[0][0].resolve(), 0)
    settings = replace(SETTINGS, max_new_tokens=200, stop_token_ids=(5, 41), eos_token_id=41)
    prompts = [
        RolloutPrompt(tokens=request.tokens, text="", record={}, sample=place, seed=place)
        for place, request in enumerate(questions(64))
    ]
    with FreeRollouts(client, function_of(one_answer, length=240, tokens=200), TOKENIZER, settings) as free:
        free.start(0, prompts, seed=7)
        for version in (1, 2, 3):
            time.sleep(0.2)
            started = time.monotonic()
            with free.interrupted():
                client.update_weights(models[version % 2][0].resolve(), version)
            took = time.monotonic() - started
        (rollouts,) = complete(free, 1).values()
    samples = [rollout.samples[0] for rollout in rollouts]
    mixed = [len(set(sample.versions.tolist())) for sample in samples]
    right, wrong = [0.0], []
    for sample in samples:
        for version in set(sample.versions.tolist()):
            right.append(gap_of(models[version % 2][1], sample, sample.versions == version, 1.3))
            wrong.append(gap_of(models[1 - version % 2][1], sample, sample.versions == version, 1.3))
    count = sum(versions > 1 for versions in mixed)
    report(f"{count} of 256 answers of up to {max(mixed)} weights, log-probs within {max(right):.1e}")
    report(f"an update took {took:.2f} s")
    assert count > 8 and max(right) < 5e-5 and np.median(wrong) > 0.1
    assert client.metrics()["engine_failed_attempts"] == 0


def test_a_job_samples_and_trains_with_it(models, servers, tmp_path, report):
    """GRPO on two ranks, rollouts of several turns that run free; resumed from its middle, it samples the same."""
    write_data(tmp_path)
    found = {}
    for name, parts in (("whole", [4]), ("parts", [2, 4])):
        for steps in parts:
            made = job(
                tmp_path,
                exp_name=name,
                warmup=None,
                max_steps=steps,
                save_steps=2,
                resume_from_checkpoint=steps != parts[0],
                rollout_samples=-1,
                eval_samples=0,
                rollout_function="tests.jobs.rollouts.rollout_functions:three_turns",
                rollout_args={"pause": 0.05},
                loss_agg_mode="rollout-token-mean",
                actor_infer={
                    "strategy_args": {"strategy_name": "vllm"},
                    "engine_args": {"urls": [server.url for server in servers]},
                },
            )
            made["pretrain"] = str(models[0][0])
            del made["reward_function"]
            run_ranks(2, "tests.jobs.rl.jobs:run", made)
        rows = read_metrics(tmp_path / "runs" / name / "metrics.jsonl")
        lines = (tmp_path / "runs" / name / "rollouts.jsonl").read_text().splitlines()
        found[name] = rows, [json.loads(line)["response"] for line in lines]
    rows, responses = found["whole"]
    largest = max(row["engine_gap_max"] for row in rows)
    report(f"log-probs against the trainer's, after each of {len(rows)} updates: {largest:.1e}")
    assert len(rows) == 4 and largest < 5e-5 and all(row["grad_norm"] > 0 for row in rows)
    assert responses == found["parts"][1] and len(responses) == 4 * 12
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in found["parts"][0]], abs=1e-5)


def test_in_bfloat16_its_log_probs_are_near(models, tmp_path, report):
    server = Server(models[0][0], tmp_path / "log", "bfloat16")
    try:
        client, asked = engine(server.wait().url), questions()
        client.update_weights(models[0][0].resolve(), 1)
        found = gap(models[0][1], asked, client.generate(asked, SETTINGS))
    finally:
        server.kill()
    report(f"log-probs of bf16 against transformers in fp32: {found:.2f} at most")
    assert found < 0.5


def test_a_killed_server_costs_no_answer_and_two_end_the_call(models, servers):
    """The last test, as it kills both."""
    client, asked = engine(*(server.url for server in servers)), questions(64)
    client.update_weights(models[1][0].resolve(), 2)
    expected = client.generate(asked, SETTINGS)
    client.metrics()
    found = while_in_flight(lambda: client.generate(asked, SETTINGS), servers[1].kill)
    assert [one.tokens for one in found] == [one.tokens for one in expected]
    assert client.metrics()["engine_dropped"] == 1 and [*client.live] == [servers[0].url]
    error = while_in_flight(lambda: client.generate(asked, SETTINGS), servers[0].kill)
    assert isinstance(error, EngineError) and "Look at the servers' logs" in str(error)
