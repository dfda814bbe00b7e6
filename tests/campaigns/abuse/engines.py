"""Abuses of rollouts by engines: servers that fail, answer wrongly, or are not engines."""

from __future__ import annotations

import contextlib
import json
import subprocess
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

from tests.campaigns.abuse.directories import tiny_model
from tests.campaigns.abuse.runner import DONE, FAILED, Abuse, Lost, free_port, limit, reached, started
from tests.campaigns.abuse.scenes import METRICS, WAITING, faults_of

_PLACE = "http://server-{}"
"""Placeholder of a URL until its server runs."""
Server = Callable[[Path], AbstractContextManager[str]]
"""Starts a server for the abuse in a folder; yields its URL."""


@contextlib.contextmanager
def _serving(home: Path, module: str, *arguments: str, log: str) -> Iterator[str]:
    out = home / f"{log}.out"
    with started(home, "-m", f"tests.jobs.engines.{module}", *arguments, log=log) as process:
        reached(lambda: "\n" in out.read_text(), process, f"the server {log}")
        (url,) = json.loads(out.read_text().splitlines()[0])
        yield url


def _order(url: str, fault: str, times: int = 1000) -> None:
    body = json.dumps({"kind": fault, "times": times}).encode()
    request = urllib.request.Request(f"{url}/_fault", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=limit(30)):
        pass


def engine(fault: str | None = None, *, kind: str = "sglang", log: str = "engine") -> Server:
    """Test engine with `fault` at every generation request."""

    @contextlib.contextmanager
    def server(home: Path) -> Iterator[str]:
        with _serving(home, "server", str(tiny_model(home, "llama3")), "--kind", kind, log=log) as url:
            if fault is not None:
                _order(url, fault)
            yield url

    return server


def stranger(kind: str, at: str) -> Server:
    """Server that answers like an engine, except on paths that begin with `at`."""
    return lambda home: _serving(home, "strange_server", "--at", at, kind, log="stranger")


def strange_answers(kind: str) -> Server:
    """Engine whose generations alone are strange: its weights and their log-probs are those that were sent."""

    @contextlib.contextmanager
    def server(home: Path) -> Iterator[str]:
        with engine()(home) as url:
            options = ("--at", "/generate", "--engine", url)
            with _serving(home, "strange_server", *options, kind, log="stranger") as strange_url:
                yield strange_url

    return server


@contextlib.contextmanager
def nobody(home: Path) -> Iterator[str]:
    """URL of a port without a listener."""
    yield f"http://127.0.0.1:{free_port()}"


def _among(*servers: Server, steps: int = 0) -> Callable[[Path], AbstractContextManager[Lost]]:
    """Start the servers and set their URLs in the job; check `steps` steps in the metrics afterwards."""

    @contextlib.contextmanager
    def scene(home: Path) -> Iterator[Lost]:
        folder = tiny_model(home, "llama3")
        with ExitStack() as stack:
            urls = [stack.enter_context(server(home)) for server in servers]
            text = (home / "job.yaml").read_text().replace("MODEL", str(folder))
            for number, url in enumerate(urls):
                text = text.replace(_PLACE.format(number), url)
            (home / "job.yaml").write_text(text)
            (home / "urls.json").write_text(json.dumps(urls))
            yield lambda: faults_of(home / METRICS, steps) if steps else ""

    return scene


def _asked(name: str, *servers: Server, code: int = FAILED, words: tuple[str, ...], **options: Any) -> Abuse:
    """Abuse of a job with rollouts by these servers."""
    changes: Mapping[str, Any] = options.pop("settings", {})
    settings = {
        "pretrain": "MODEL",
        "tokenizer": {"type": "hf", "name_or_path": "MODEL"},
        "actor_train.model_args": {},
        "actor_infer.strategy_args.strategy_name": "sglang",
        "actor_infer.engine_args.urls": [_PLACE.format(number) for number in range(len(servers))],
        "actor_infer.engine_args.request_timeout": 30,
        "actor_infer.engine_args.retries": 1,
        **changes,
    }
    scene = _among(*servers, steps=settings.get("max_steps", 1) if code == DONE else 0)
    return Abuse(name=f"engine: {name}", code=code, settings=settings, words=words, scene=scene, **options)


def stop_server(home: Path, process: subprocess.Popen[bytes]) -> None:
    """Stop the first server while the rewards of the first step are computed."""
    reached((home / "here").exists, process, "the first step")
    _order(json.loads((home / "urls.json").read_text())[0], "die")
    (home / "go").touch()


URL = "http://127.0.0.1:"
DROPPED = (URL, "is dropped until the next weights are sent")
NO_WEIGHTS = ("sglang: no server took the weights", URL)
ATTEMPTS = ("rollouts", "sglang: a request failed 2 times", URL)

ENGINES = [
    _asked("nothing listens at the URL", nobody, words=(*NO_WEIGHTS, "ClientConnectorError")),
    _asked("a web page at the URL", stranger("html", at="/"), words=(*NO_WEIGHTS, "the reply is not JSON: <html>")),
    _asked("vLLM at the URL of SGLang", engine(kind="vllm"), words=(*NO_WEIGHTS, "status 404")),
    _asked("status 500 for every response", engine("500"), words=(*ATTEMPTS, "status 500: out of memory")),
    _asked("closes the connection in the answer", strange_answers("cut"), words=(*ATTEMPTS, "ClientPayloadError")),
    _asked("no JSON for an answer", strange_answers("html"), words=(*ATTEMPTS, "<html>")),
    _asked("too few log-probs", engine("short"), words=(*ATTEMPTS, " log-probs for ")),
    _asked(
        "too many tokens", strange_answers("too many"), words=(*ATTEMPTS, "30 tokens, where 1 to 13 were asked for")
    ),
    _asked("NaN for a log-prob", strange_answers("nan"), words=(*ATTEMPTS, "no logarithms of probabilities")),
    _asked(
        "tokens outside the vocabulary",
        strange_answers("unknown ids"),
        words=(*ATTEMPTS, "no token ids of the model's 61"),
    ),
    _asked("answers of older weights", engine("stale"), words=(*ATTEMPTS, "it is of the weights 'older'")),
    _asked(
        "never answers",
        engine("slow"),
        settings={"actor_infer.engine_args.request_timeout": 4},
        words=(*ATTEMPTS, "TimeoutError", "request_timeout"),
    ),
    _asked(
        "cannot read the folder of weights",
        stranger("no folder", at="/update_weights_from_disk"),
        words=(*NO_WEIGHTS, "weights_folder"),
    ),
    _asked(
        "one of two is none",
        stranger("html", at="/"),
        engine(),
        code=DONE,
        words=DROPPED,
        warnings=1,
    ),
    _asked(
        "the only one ends after the first step",
        engine(),
        settings={"max_steps": 2},
        files=WAITING,
        words=(*NO_WEIGHTS, "ClientConnectorError"),
        meddle=stop_server,
    ),
    _asked(
        "one of two ends after the first step",
        engine(),
        engine(log="other"),
        code=DONE,
        settings={"max_steps": 2},
        files=WAITING,
        words=DROPPED,
        warnings=1,
        meddle=stop_server,
    ),
]
