"""Other programs at an engine's URL: one error, in bounded time and memory, and nothing trains on their replies."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("aiohttp")

from roll_batching.errors import EngineError
from roll_batching.jobs.engines.protocol import GenerationRequest, MalformedReply
from roll_batching.jobs.engines.replicas import EngineLimits, Replicas
from roll_batching.jobs.engines.sglang import SGLang
from roll_batching.jobs.engines.vllm import VLLM
from roll_batching.strategy.sampling import GenerationSettings
from tests.jobs.engines.strange_server import KINDS

pytestmark = [pytest.mark.cluster, pytest.mark.bad_input]
SETTINGS = GenerationSettings(max_new_tokens=12, eos_token_id=5, vocab_size=64)
LIMITS = EngineLimits(seconds=2, retries=1)
QUESTIONS = [GenerationRequest(tokens=[1, 2, 3], seed=n, group=n) for n in range(3)]
ROOT = Path(__file__).parents[3]
IDS, LOGS, NONE = "no token ids of the model's 64", "no logarithms of probabilities", "TypeError"
SAYS = {
    "nan": LOGS,
    "infinite": LOGS,
    "huge number": LOGS,
    "words": LOGS,
    "unknown ids": IDS + r": \[7, 64, 5\]",
    "enormous ids": IDS,
    "negative ids": IDS,
    "floats for ids": IDS,
    "too few": "2 log-probs for 3 tokens",
    "no tokens": "0 tokens, where 1 to 12 were asked for",
    "too many": "30 tokens, where 1 to 12 were asked for",
    "other reason": r"the request ended with \['stop'",
    "html": NONE,
    "500": "status 500: <html>",
    "not utf-8": "KeyError",
    "trickle": "TimeoutError",
    "silent": "TimeoutError",
    "cut": "ClientPayloadError",
    "twice in one": NONE,
    "deep": NONE,
    "huge": "its reply has more than 32 MiB",
    "packed": "its reply has more than 32 MiB",
    "elsewhere": "refuses the request with status 302",
    "no folder": "refuses the request with status 400",
    "no http": "Bad status line|ClientResponseError|ServerDisconnected",
}


@pytest.fixture(scope="module")
def urls():
    command = [sys.executable, "-m", "tests.jobs.engines.strange_server", *KINDS]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        yield dict(zip(KINDS, json.loads(process.stdout.readline()), strict=True))
        process.kill()


def engine_of(*urls, api=None):
    made = Replicas(urls, api or SGLang(), LIMITS)
    made.set_live(made.live, 1)
    return made


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "good"])
def test_a_strange_answer_ends_in_one_error_that_says_what_came(kind, urls, report):
    before, began = peak(), time.monotonic()
    with pytest.raises(EngineError, match=SAYS[kind]) as caught:
        engine_of(urls[kind]).generate(QUESTIONS, SETTINGS)
    assert time.monotonic() - began < 60 and peak() - before < 600e6
    said = str(caught.value)
    assert len(said) < 2000 and said.isprintable()
    report(f"{kind}: {said[:160]}")


@pytest.mark.parametrize("kind", ["nan", "unknown ids", "html", "cut", "huge", "no http"])
def test_another_server_answers_where_one_is_strange(kind, urls):
    engine = engine_of(urls[kind], urls["good"])
    assert [one.tokens for one in engine.generate(QUESTIONS, SETTINGS)] == [[7, 8, 5]] * 3
    assert engine.metrics()["engine_failed_attempts"] >= 1


@pytest.mark.parametrize("kind", ["html", "500", "cut", "silent", "good", "elsewhere", "no http"])
@pytest.mark.parametrize("api", [SGLang(), VLLM()], ids=lambda one: one.name)
def test_who_takes_weights_in_a_strange_way_has_none(api, kind, urls, tmp_path):
    """A proxy that answers everything with a page has taken none; what answers `good` does not say who it is."""
    if api.name == "sglang" and kind == "good":
        pytest.skip("JSON without `success` is what older versions answer")
    engine = engine_of(urls[kind], api=api)
    with pytest.raises(EngineError, match="no server took the weights"):
        engine.update_weights(tmp_path, 2)
    assert not engine.live


def test_a_server_that_tells_strange_sizes_joins_no_group():
    """A page or half an answer at the path that tells a server's size and the version of its weights."""
    api = SGLang()
    for info in (None, True, "<html>", [], {}, {"tp_size": None, "pp_size": 1, "dp_size": 1}):
        assert api.weight_version(info) != "3"
        with pytest.raises(MalformedReply):
            api.world_size(info)
    for size in (0, -1, float("inf"), float("nan")):
        with pytest.raises(MalformedReply):
            api.world_size({"tp_size": size, "pp_size": 1, "dp_size": 1})


def peak():
    """Peak memory of this process, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
