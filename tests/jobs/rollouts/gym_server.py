"""A local server in NeMo-Gym's documented format: the head server and one agent, with scripted replies."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import yaml
from aiohttp import web


def item(before: list[int], sampled: list[int], kind: str = "message", first: float = -0.5) -> dict[str, Any]:
    """An output item that ends a model call; log-probs count down from `first` by 0.25."""
    return {
        "type": kind,
        "prompt_token_ids": before,
        "generation_token_ids": sampled,
        "generation_log_probs": [first - place / 4 for place in range(len(sampled))],
    }


def reply(*output: dict[str, Any], **result: Any) -> dict[str, Any]:
    """The reply of an agent's `/run`."""
    return {"response": {"output": list(output)}, "reward": 1.0, **result}


class GymServer:
    """Head server and the agent `simple`; `answer` makes a reply, or an HTTP status, of the request's body."""

    def __init__(self, answer: Callable[[dict[str, Any]], Any]) -> None:
        self.answer, self.requests, self.configurations = answer, list[dict[str, Any]](), 0
        self._loop, self._ready = asyncio.new_event_loop(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> GymServer:
        self._thread.start()
        assert self._ready.wait(20)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._start())
        self._ready.set()
        self._loop.run_forever()

    async def _start(self) -> None:
        app = web.Application()
        app.add_routes([web.get("/global_config_dict_yaml", self._configuration), web.post("/run", self._answer)])
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.port = runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self.port}"

    async def _configuration(self, request: web.Request) -> web.Response:
        self.configurations += 1
        agent = {"simple_agent": {"host": "127.0.0.1", "port": self.port, "entrypoint": "app.py"}}
        servers = {"simple": {"responses_api_agents": agent}, "policy_base_url": "http://127.0.0.1:8000/v1"}
        return web.json_response(yaml.safe_dump(servers))

    async def _answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        answer = self.answer(body)
        if isinstance(answer, int):
            return web.Response(status=answer, text="the agent failed")
        return web.json_response(answer)
