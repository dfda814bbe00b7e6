"""A server replica, common to both kinds: weights, faults, sleep and generation."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import math
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

from aiohttp import web

from tests.jobs.engines.model import Model


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a server was started."""

    processed: bool = False
    """vllm: as --logprobs-mode processed_logprobs."""
    sleeps: bool = False
    """As --enable-sleep-mode, --enable-memory-saver."""
    ranks: int = 1
    """As --tp-size."""
    dummy: bool = False
    """As --load-format dummy: without real weights, until it is told otherwise to read some."""
    experts: bool = False
    """As --enable-return-routed-experts."""
    keeps_head: str = ""
    """Keeps the output head when it loads weights, and reports success: "tied" where it gets no tensor for it."""
    token_seconds: float = 0.0
    """Time that each token of a response takes."""
    older: bool = False
    """sglang: /get_server_info, and no /server_info yet."""


class Replica:
    """One replica."""

    def __init__(self, folder: str, options: Options) -> None:
        self.folder, self.options = folder, options
        self.model = Model(folder)
        if options.dummy:
            self.model.forget()
        self.instance_id = f"{time.time_ns()}"
        self.asleep: set[str] = set()
        """Of "weights" and "kv_cache", what has no memory at the moment."""
        self.version = "default"
        self.going = asyncio.Event()
        self.going.set()
        self.busy = asyncio.Lock()
        self.seen: collections.Counter[str] = collections.Counter()
        self.in_flight = self.most_in_flight = 0
        self.requests: set[asyncio.Event] = set()
        """Set for those that are aborted."""
        self.prompts: list[list[int]] = []
        self.faults: list[str] = []
        self.weight_faults: dict[int, str] = {}
        """By number of the update, from this moment on."""
        self.close: Any = None

    routes: dict[str, str] = {}
    """Paths of POST requests, and the methods that answer them."""

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 30)
        app.add_routes(
            [web.get("/health", self.health), web.post("/_fault", self.fault), web.get("/_seen", self.tell)]
            + [web.post(path, getattr(self, method)) for path, method in self.routes.items()]
        )
        return app

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def fault(self, request: web.Request) -> web.Response:
        order = await request.json()
        if order["kind"] == "restart":
            await self.restart()
        elif order["kind"] == "die":
            asyncio.get_running_loop().call_later(0.05, lambda: asyncio.ensure_future(self.close()))
        elif order["kind"].startswith("weights_"):
            self.weight_faults[self.seen["received"] + order.get("after", 0)] = order["kind"]
        else:
            self.faults += [order["kind"]] * order.get("times", 1)
        return web.Response()

    async def restart(self) -> None:
        """As a new process under the same URL: with the weights that it was started with."""
        await asyncio.to_thread(self.model.load, self.folder)
        self.instance_id, self.version = f"{time.time_ns()}", "default"

    async def tell(self, request: web.Request) -> web.Response:
        return web.json_response(
            {**self.seen, "most_in_flight": self.most_in_flight, "version": self.version, "prompts": self.prompts}
        )

    async def abort(self) -> None:
        """Ends all requests, as pausing and sleeping do by default."""
        for aborted in self.requests:
            aborted.set()
        await asyncio.sleep(0.05)

    def release(self, tags: list[str]) -> None:
        """What was in that memory is forgotten."""
        self.asleep |= set(tags)
        self.seen["sleeps"] += 1
        if "weights" in tags:
            self.model.model = None

    def check_ready(self) -> None:
        """Raises RuntimeError where weights cannot be changed."""
        if "weights" in self.asleep:
            raise RuntimeError("there is no memory for weights")
        if self.going.is_set() and not self.asleep:
            raise RuntimeError("weights are changed while generation goes on")

    async def load(self, folder: str) -> None:
        self.check_ready()
        async with self.busy:
            load = self.model.load
            if self.options.keeps_head:
                load = partial(self.model.load_but_the_head, always=self.options.keeps_head == "always")
            await asyncio.to_thread(load, folder)
        self.seen["updates"] += 1

    async def scored(self, tokens: list[int]) -> list[float]:
        """Log-probs of a prompt, once generation goes on. Not counted as a request."""
        await self.going.wait()
        async with self.busy:
            return await asyncio.to_thread(self.model.score, tokens)

    async def answered(self, request: web.Request, prompt: Any, how: dict[str, Any], reply: Any) -> web.Response:
        self.seen["requests"] += 1
        if isinstance(prompt, list):
            self.prompts.append(prompt)
        self.in_flight += 1
        self.most_in_flight = max(self.in_flight, self.most_in_flight)
        aborted = asyncio.Event()
        try:
            fault = self.faults.pop(0) if self.faults else ""
            if fault == "restarts":
                await self.restart()
            if fault == "dies":
                asyncio.ensure_future(self.close())
                await asyncio.sleep(3600)
            if fault == "slow":
                self.requests.add(aborted)
                await aborted.wait()
            if fault == "500":
                raise web.HTTPInternalServerError(text="out of memory")
            if fault == "cut":
                assert request.transport is not None
                request.transport.abort()
            await self.going.wait()
            if self.asleep:
                raise web.HTTPInternalServerError(text=f"asleep: {sorted(self.asleep)}")
            self.requests.add(aborted)
            began = time.monotonic()
            async with self.busy:
                if not aborted.is_set():
                    made = await asyncio.to_thread(self.model.sample, prompt, how)
            if not aborted.is_set() and self.options.token_seconds:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(aborted.wait(), len(made[0]) * self.options.token_seconds)
            if aborted.is_set():
                count = int((time.monotonic() - began) / (self.options.token_seconds or math.inf))
                tokens, values, _ = made if count else ([], collections.defaultdict(list), "")
                made = tokens[:count], {name: values[name][:count] for name in ("scaled", "raw", "processed")}, "abort"
            return web.json_response(reply(*made, fault))
        finally:
            self.in_flight -= 1
            self.requests.discard(aborted)


async def fields(request: web.Request, names: list[str]) -> dict[str, Any]:
    """The request's JSON object. A field that the engine does not have is refused with 400, as a test of the client."""
    body = await request.json() if request.can_read_body else {}
    known(body, names)
    return body


def known(body: dict[str, Any], names: list[str]) -> None:
    extra = sorted(set(body) - set(names))
    if extra:
        raise web.HTTPBadRequest(text=json.dumps({"error": {"message": f"unknown fields: {extra}"}}))
