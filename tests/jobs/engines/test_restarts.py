"""Restarted vLLM servers: responses of their initial weights are never used."""

from __future__ import annotations

import asyncio

import pytest

from roll_batching.errors import EngineError
from roll_batching.jobs.engines.free_requests import FreeRequests
from roll_batching.jobs.engines.replicas import EngineLimits, Replicas
from roll_batching.jobs.engines.vllm import VLLM
from tests.jobs.engines.test_replicas import SETTINGS, order, questions
from tests.jobs.engines.test_weight_broadcast import Servers, models

pytest.importorskip("aiohttp")
pytestmark = pytest.mark.cluster
assert models  # the fixture: two model directories of one architecture


@pytest.fixture(scope="module")
def servers(models):
    """Two servers of the first model, and an engine that has sent them the second."""
    made = Servers(models[0], "--kind", "vllm")
    yield made
    for number in range(2):
        made.end(number)


@pytest.fixture
def engine(servers, models):
    made = Replicas(servers.urls, VLLM(), EngineLimits(seconds=30, retries=1))
    made.update_weights(models[1].resolve(), 1)
    return made


def test_a_server_that_was_started_again_is_not_asked_until_it_has_the_weights(servers, engine, models, report):
    asked = questions(4, 2)
    expected = engine.generate(asked, SETTINGS)
    assert engine.metrics()["engine_requests"] == 8
    servers.restart(1)
    assert engine.generate(asked, SETTINGS) == expected, "not the first weights' answers"
    figures = engine.metrics()
    assert (figures["engine_dropped"], figures["engine_failed_attempts"]) == (1, 0)
    assert [*engine.live] == servers.urls[:1]
    engine.update_weights(models[1].resolve(), 2)
    assert [*engine.live] == servers.urls and engine.generate(asked, SETTINGS) == expected
    order(servers.urls[1], "restart")
    order(servers.urls[0], "restart")
    with pytest.raises(EngineError, match="no server is left: .*was started again, and has not the weights") as caught:
        engine.generate(asked, SETTINGS)
    report(str(caught.value))


def test_what_a_server_answered_in_a_round_in_which_it_was_started_again_is_asked_elsewhere(servers, engine):
    asked = questions(4, 2)
    expected = engine.generate(asked, SETTINGS)
    engine.metrics()
    order(servers.urls[0], "restarts")
    assert engine.generate(asked, SETTINGS) == expected
    figures = engine.metrics()
    assert figures["engine_dropped"] == 1 and figures["engine_failed_attempts"] == 4, "all of its answers"
    assert figures["engine_requests"] == 12 and [*engine.live] == servers.urls[1:]


def test_rollouts_that_ask_at_once_learn_alike_that_a_server_was_started_again(servers, engine):
    (request, other), url = questions(2, 1), servers.urls[0]
    free = FreeRequests(engine)

    async def ask() -> list[bool]:
        await free.open()
        used = (await free.generate(request, SETTINGS)).servers
        assert not await free.has_restarted(used)
        await asyncio.to_thread(order, url, "restart")
        found = await asyncio.gather(*(free.has_restarted(used) for _ in range(4)))
        elsewhere = (await free.generate(other, SETTINGS)).servers
        assert await free.has_restarted(used) and not await free.has_restarted(elsewhere)
        await free.close()
        return list(found)

    assert asyncio.run(ask()) == [True] * 4
    assert engine.metrics()["engine_dropped"] == 1


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("about", "words"),
    [
        ({"vllm_config": "model='m'"}, "TypeError"),
        ({"vllm_config": {"instance_id": "", "model_config": {"logprobs_mode": "raw_logprobs"}}}, "no instance_id"),
        ("<html>", "TypeError"),
    ],
)
def test_a_server_that_does_not_say_which_process_it_is(about, words):
    with pytest.raises(ValueError, match=words):
        VLLM().parse_process(about)
