"""Weights to servers over process groups: values, buckets, and servers that fail in an update."""

from __future__ import annotations

import time

import psutil
import pytest
import torch

pytest.importorskip("aiohttp")

from safetensors.torch import load_file

from roll_batching.errors import EngineError
from roll_batching.jobs.engines.replicas import EngineLimits, Replicas
from roll_batching.jobs.engines.sglang import SGLang
from roll_batching.jobs.engines.weight_broadcast import WeightBroadcast, new_store
from tests.huggingface import tiny
from tests.jobs.engines.test_replicas import SETTINGS, ServerProcess, order, questions, seen

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two model directories of one architecture, and the tensors of the second."""
    folder = tmp_path_factory.mktemp("weights")
    tiny.write_model(folder / "first", "qwen3")
    model = tiny.write_model(folder / "second", "qwen3")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    model.save_pretrained(folder / "second")
    tensors = list(load_file(folder / "second" / "model.safetensors").items())
    return folder / "first", folder / "second", tensors


class Servers:
    """Processes of one server each."""

    def __init__(self, folder, *options, count=2):
        self.folder, self.options = folder, options
        self.processes = [ServerProcess(folder, *options) for _ in range(count)]
        self.urls = [process.urls()[0] for process in self.processes]

    def restart(self, number):
        self.end(number)
        port = self.urls[number].rsplit(":", 1)[1]
        self.processes[number] = ServerProcess(self.folder, *self.options, "--port", port)
        assert self.processes[number].urls() == [self.urls[number]]

    def end(self, number):
        self.processes[number].kill()


@pytest.fixture(scope="module")
def servers(models):
    """Two, of two ranks each."""
    made = Servers(models[0], "--tp-size", "2", "--older", "--sleeps")
    yield made
    for number in range(len(made.processes)):
        made.end(number)


def listening():
    """Addresses that this process listens on."""
    return {(one.laddr.ip, one.laddr.port) for one in psutil.Process().net_connections() if one.status == "LISTEN"}


@pytest.mark.parametrize(
    ("urls", "is_local"),
    [
        (["http://127.0.0.1:1", "http://localhost:2", "http://[::1]:3"], True),
        (["http://127.0.0.1:1", "http://192.0.2.1:2"], False),
    ],
)
def test_the_store_listens_beyond_this_machine_only_for_servers_there(urls, is_local):
    before = listening()
    store = new_store(urls)
    (ip,) = {ip for ip, port in listening() - before if port == store.port}
    assert (ip == "127.0.0.1") == is_local


def sender_to(urls, seconds=120.0):
    engine = Replicas(urls, SGLang(), EngineLimits(seconds=seconds, retries=1))
    return engine, WeightBroadcast(engine, engine.api, torch.device("cpu"))


def update(sender, tensors, version, *, asleep=False):
    """In three buckets; bytes sent."""
    sender.begin(asleep=asleep)
    third = len(tensors) // 3
    sent = sender.send(tensors[:third]) + sender.send(tensors[third:-1]) + sender.send(tensors[-1:], version)
    sender.end(version, asleep=asleep)
    return sent


def test_what_is_sent_is_what_a_directory_holds(servers, models, report):
    """Twice awake and once asleep, through one group each."""
    first, second, tensors = models
    asked, whole = questions(2, 2), sum(tensor.nbytes for _, tensor in tensors)
    engine, sender = sender_to(servers.urls)
    engine.update_weights(second.resolve(), 1)
    expected = engine.generate(asked, SETTINGS)
    engine.update_weights(first.resolve(), 2)
    assert engine.generate(asked, SETTINGS) != expected
    for version in (3, 4):
        assert update(sender, tensors, version) == 2 * whole
        assert engine.generate(asked, SETTINGS) == expected
    engine.sleep()
    update(sender, tensors, 5, asleep=True)
    assert engine.generate(asked, SETTINGS) == expected and engine.version == 5
    told = [seen(url) for url in servers.urls]
    assert {(one["joined"], one["received"], one["version"]) for one in told} == {(1, 9, "5")}
    assert {one["bytes"] for one in told} == {3 * whole} and max(one["largest"] for one in told) < whole
    sender.close()
    assert all(seen(url)["left"] == 1 for url in servers.urls)
    report(f"{whole} bytes to each of two servers of two ranks, in buckets of {told[0]['largest']} at most")


@pytest.mark.slow
def test_a_server_that_dies_in_an_update_is_dropped_and_joins_again(servers, models, report):
    _, _, tensors = models
    asked = questions(2, 2)
    engine, sender = sender_to(servers.urls)
    update(sender, tensors, 1)
    joined = seen(servers.urls[0])["joined"]
    expected = engine.generate(asked, SETTINGS)
    order(servers.urls[1], "weights_die")
    began = time.monotonic()
    update(sender, tensors, 2)
    assert time.monotonic() - began < 60
    assert [*engine.live] == servers.urls[:1] and engine.generate(asked, SETTINGS) == expected
    assert engine.metrics()["engine_dropped"] == 1
    servers.restart(1)
    update(sender, tensors, 3)
    assert [*engine.live] == servers.urls and engine.generate(asked, SETTINGS) == expected
    assert [seen(url)["joined"] for url in servers.urls] == [joined, 1], "the one that stayed is in the same group"
    servers.restart(0)
    update(sender, tensors, 4)
    assert [*engine.live] == servers.urls, "it was started again between two updates: it has no such group"
    assert engine.generate(asked, SETTINGS) == expected


@pytest.mark.slow
@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("fault", "seconds", "words"),
    [
        ("weights_refused", 300, "/init_weights_update_group.*Failed to initialize custom process group: no NCCL"),
        ("weights_misfit", 300, "/update_weights_from_distributed.*must match the size of tensor b"),
        ("weights_hang", 15, "request_timeout = 15 seconds|/update_weights_from_distributed: TimeoutError"),
    ],
)
def test_a_server_that_does_not_take_weights_holds_nobody_up(fault, seconds, words, servers, models, report):
    """It is dropped within the limit; the other one has them. Where it is the only one, that is the error."""
    _, _, tensors = models
    order(servers.urls[1], fault)
    engine, sender = sender_to(servers.urls, seconds)
    began = time.monotonic()
    update(sender, tensors, 1)
    assert time.monotonic() - began < 120 and [*engine.live] == servers.urls[:1]
    assert len(engine.generate(questions(1, 1), SETTINGS)) == 1
    order(servers.urls[1], fault)
    _, sender = sender_to(servers.urls[1:], seconds)
    with pytest.raises(EngineError, match=f"no server took the weights that were sent: .*({words})") as caught:
        update(sender, tensors, 2)
    report(str(caught.value))
