"""Engines by URL, against servers with the documented APIs and injected faults."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import time
import urllib.request
from pathlib import Path

import pytest
import torch

pytest.importorskip("aiohttp")

from roll_batching.errors import EngineError
from roll_batching.jobs.engines.protocol import GenerationRequest
from roll_batching.jobs.engines.replicas import EngineLimits, Replicas
from roll_batching.jobs.engines.sglang import SGLang
from roll_batching.jobs.engines.vllm import VLLM
from roll_batching.strategy.sampling import GenerationSettings
from tests.huggingface import tiny
from tests.jobs.engines.model import Model
from tests.support.ranks import kill_process, start_process

pytestmark = pytest.mark.cluster

SETTINGS = GenerationSettings(max_new_tokens=12, eos_token_id=5, temperature=1.3, top_k=20, top_p=0.9)
DIALECTS = {"sglang": SGLang(), "vllm": VLLM()}


class ServerProcess:
    """A process of servers, which are about to start."""

    def __init__(self, folder, *options):
        self.home = tempfile.TemporaryDirectory()
        target = "tests.jobs.engines.server:main"
        self.process = start_process(Path(self.home.name), target, [str(folder), *options])
        self.pid = self.process.pid

    def urls(self):
        """The URLs of its servers, which answer."""
        output, until = Path(self.home.name) / "output0", time.monotonic() + 60
        while not (lines := re.findall(r"^\[.*\]\n", output.read_text(), re.MULTILINE)):
            assert self.process.poll() is None and time.monotonic() < until, output.read_text()
            time.sleep(0.02)
        return json.loads(lines[0])

    def kill(self):
        kill_process(self.process)
        self.home.cleanup()


def start(folder, *options):
    """Servers, and their URLs."""
    process = ServerProcess(folder, *options)
    return process, process.urls()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("engine") / "model"
    return folder, tiny.write_model(folder, "qwen3")


@pytest.fixture(params=["sglang", "vllm"])
def servers(request, model):
    process, urls = start(model[0], "--kind", request.param, "--replicas", "2", "--processed", "--sleeps")
    yield DIALECTS[request.param], urls
    process.kill()


def order(url, kind, times=1, after=0):
    body = json.dumps({"kind": kind, "times": times, "after": after}).encode()
    urllib.request.urlopen(urllib.request.Request(f"{url}/_fault", data=body, method="POST")).read()


def seen(url):
    return json.loads(urllib.request.urlopen(f"{url}/_seen").read())


def questions(groups=6, members=3):
    rows = [row.tolist() for row in tiny.rows()]
    return [
        GenerationRequest(tokens=rows[group % len(rows)], seed=100 * group + member, group=group)
        for group in range(groups)
        for member in range(members)
    ]


def test_a_round_with_faults(servers, model, report):
    """One round after another on the same two servers: what each fault does, and that no answer is lost or changed."""
    api, urls = servers
    engine = Replicas(urls, api, EngineLimits(seconds=20, in_flight=4, retries=3))
    engine.update_weights(model[0].resolve(), 7)
    asked = questions()
    quiet = engine.generate(asked, SETTINGS)
    check_log_probs(model[1], asked, quiet, processed=api.name == "vllm")
    assert engine.metrics() == {
        "engine_requests": 18, "engine_failed_attempts": 0, "engine_dropped": 0, "engine_replicas": 2
    }  # fmt: skip
    told = [seen(url) for url in urls]
    assert [one["requests"] for one in told] == [9, 9], "half of the groups each"
    assert {one["most_in_flight"] for one in told} == {4}
    assert not {json.dumps(p) for p in told[0]["prompts"]} & {json.dumps(p) for p in told[1]["prompts"]}, "by group"
    faults = ["500", "cut", "short", "abort"] + (["other", "stale"] if api.name == "sglang" else [])
    for fault in faults:
        order(urls[0], fault)
    assert engine.generate(asked, SETTINGS) == quiet, "seeds are the request's, whoever answers and when"
    figures = engine.metrics()
    assert figures["engine_failed_attempts"] == len(faults) and figures["engine_dropped"] == 0
    order(urls[1], "die")
    time.sleep(0.5)
    assert engine.generate(asked, SETTINGS) == quiet
    figures = engine.metrics()
    assert (figures["engine_dropped"], figures["engine_replicas"]) == (1, 1) and [*engine.live] == urls[:1]
    engine.update_weights(model[0].resolve(), 8)
    assert [*engine.live] == urls[:1], "it is tried again with new weights, and is not there"
    order(urls[0], "500", 100)
    with pytest.raises(EngineError, match="a request failed 4 times: .*status 500: out of memory") as caught:
        engine.generate(asked[:1], SETTINGS)
    report(str(caught.value))


def test_sleep_and_wake(servers, model, report):
    """Asleep nobody answers; weights wake them up, in the order that leaves room; one that is gone is dropped."""
    api, urls = servers
    engine = Replicas(urls, api, EngineLimits(seconds=20, retries=1))
    engine.update_weights(model[0].resolve(), 7)
    asked = questions(2, 2)
    awake = engine.generate(asked, SETTINGS)
    engine.sleep()
    impatient = Replicas(urls, api, EngineLimits(seconds=1, retries=1))
    impatient.set_live(engine.live, engine.version)
    waits = isinstance(api, SGLang)  # it is paused too, and keeps requests until it goes on
    with pytest.raises(
        EngineError, match="TimeoutError" if waits else r"status 500: asleep: \['kv_cache', 'weights'\]"
    ):
        impatient.generate(asked, SETTINGS)
    with pytest.raises(EngineError, match="there is no memory for weights"):
        engine.update_weights(model[0].resolve(), 8)
    engine.update_weights(model[0].resolve(), 8, asleep=True)
    assert engine.generate(asked, SETTINGS) == awake
    order(urls[1], "die")
    time.sleep(0.5)
    engine.sleep()
    assert [*engine.live] == urls[:1]
    engine.update_weights(model[0].resolve(), 9, asleep=True)
    assert engine.generate(asked, SETTINGS) == awake
    assert seen(urls[0])["sleeps"] == 2


def check_log_probs(model, asked, answers, processed=False):
    """Tokens among the 20 likeliest, and their log-probs at the temperature, by transformers alone.

    `processed`: after top-k and top-p.
    """
    for question, answer in zip(asked, answers, strict=True):
        whole = torch.tensor([question.tokens + answer.tokens])
        with torch.no_grad():
            logits = model(whole).logits[0, len(question.tokens) - 1 : -1]
        expected = (logits / SETTINGS.temperature).log_softmax(-1)
        if processed:
            how = {"top_k": SETTINGS.top_k, "top_p": SETTINGS.top_p}
            expected = torch.stack([Model.kept(row, how).log_softmax(-1) for row in expected])
        found = expected.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(answer.log_probs), found, atol=1e-5, rtol=1e-5)
        assert (found >= expected.topk(20).values[:, -1]).all()
        assert len(answer.tokens) == 12 or answer.tokens[-1] == 5
    assert len({tuple(a.tokens) for a in answers[:3]}) > 1, "the responses of a group differ"


@pytest.fixture(scope="module")
def one_server(model):
    process, (url,) = start(model[0])
    yield url
    process.kill()


@pytest.mark.slow
def test_a_server_that_began_with_dummy_weights_reads_real_ones(model):
    """SGLang reads later weights as it was told to read the first, where a request does not say."""
    answers = []
    for options in ([], ["--dummy"]):
        process, urls = start(model[0], *options)
        engine = Replicas(urls, SGLang())
        engine.update_weights(model[0].resolve(), 1)
        answers.append(engine.generate(questions(2, 1), SETTINGS))
        process.kill()
    assert answers[0] == answers[1]


def test_a_slow_server_is_not_waited_for(one_server):
    engine = Replicas([one_server], SGLang(), EngineLimits(seconds=2, retries=1))
    engine.set_live(engine.live, "default")
    order(one_server, "slow")
    started = time.monotonic()
    assert len(engine.generate(questions(1, 1), SETTINGS)) == 1
    assert 2 <= time.monotonic() - started < 60


@pytest.mark.bad_input
def test_a_server_that_cannot_sleep(one_server, report):
    engine = Replicas([one_server], SGLang())
    with pytest.raises(
        EngineError, match="no server went to sleep: .*no memory saver.*--enable-memory-saver"
    ) as caught:
        engine.sleep()
    report(str(caught.value))


@pytest.mark.bad_input
def test_what_a_server_refuses_is_said_at_once(one_server, report):
    class Wrong(SGLang):
        def generation_call(self, request, settings):
            call = super().generation_call(request, settings)
            call.body["sampling_params"]["temprature"] = 1
            return call

    engine = Replicas([one_server], Wrong())
    with pytest.raises(EngineError, match=r"refuses the request with status 400: .*unknown fields: \['temprature'\]"):
        engine.generate(questions(1, 1), SETTINGS)
    before = seen(one_server)["requests"]
    for path, words in (("/nowhere", "no server took the weights"),):
        with pytest.raises(EngineError, match=words) as caught:
            Replicas([one_server], SGLang()).update_weights(Path(path), 1)
        report(str(caught.value))
    gone = Replicas(["http://127.0.0.1:9"], SGLang())
    with pytest.raises(EngineError, match="no server is left: http://127.0.0.1:9: /generate: ClientConnectorError"):
        gone.generate(questions(1, 1), SETTINGS)
    assert seen(one_server)["requests"] == before, "none of it was asked twice"


@pytest.mark.bad_input
def test_servers_that_all_fail_are_one_error_with_its_cure_and_no_warnings(caplog):
    urls = ["http://127.0.0.1:9", "http://127.0.0.1:7"]
    with pytest.raises(EngineError, match="no server took the weights") as caught:
        Replicas(urls, SGLang()).update_weights(Path("/nowhere"), 1)
    assert all(url in str(caught.value) for url in urls)
    assert "engine_args.urls" in str(caught.value) and "weights_folder" in str(caught.value)
    with pytest.raises(EngineError, match="start them again, and resume"):
        Replicas(urls[:1], SGLang(), EngineLimits(retries=1)).generate(questions(1, 1), SETTINGS)
    assert not caplog.records


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("reply", "words"),
    [
        ({}, "KeyError"),
        ({"choices": []}, "ValueError"),
        ({"tokens": [7, 8], "values": [-1.0]}, "1 log-probs for 2 tokens"),
        ({"tokens": [7, 8], "values": [-1.0, None]}, "no logarithms"),
        ({"tokens": [7, 8], "values": [-1.0, 0.5]}, "no logarithms"),
        ({"tokens": [7, 8], "values": [-1.0, -2.0]}, "ended at token 8, and the tokenizer's stop tokens are"),
        ({"tokens": [7, 8], "values": [-1.0, -2.0], "reason": "length"}, "cut off after 2 of 12"),
        ({"tokens": [7] * 13, "values": [-1.0] * 13, "reason": "length"}, "13 tokens, where 1 to 12"),
    ],
)
def test_answers_that_are_none(reply, words):
    if "tokens" in reply:
        choice = {"token_ids": reply["tokens"], "finish_reason": reply.get("reason", "stop")}
        reply = {"choices": [{**choice, "logprobs": {"token_logprobs": reply["values"]}}]}
    with pytest.raises(ValueError, match=words):
        VLLM().parse_generation(reply, SETTINGS, 0)


def test_transformers_in_process(model):
    from roll_batching.jobs.engines.hf import HFEngine

    engine = HFEngine(torch.device("cpu"))
    with pytest.raises(EngineError, match="no weights yet"):
        engine.generate(questions(1, 1), SETTINGS)
    engine.update_weights(model[0], 3)
    asked = questions()
    answers = engine.generate(asked, SETTINGS)
    check_log_probs(model[1], asked, answers)
    assert engine.generate(asked, SETTINGS) == answers


def test_transformers_draws_as_it_is_asked_whatever_the_model_directory_says(model, tmp_path):
    from roll_batching.jobs.engines.hf import HFEngine

    def answers(folder):
        engine = HFEngine(torch.device("cpu"))
        engine.update_weights(folder, 1)
        return engine.generate(questions(), SETTINGS)

    folder = shutil.copytree(model[0], tmp_path / "model")
    said = {"repetition_penalty": 50.0, "temperature": 0.1, "top_k": 1, "do_sample": False, "max_length": 3}
    (folder / "generation_config.json").write_text(json.dumps(said))
    assert answers(folder) == answers(model[0])
