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
        "routed_experts": None,
    }


def reply(*output: dict[str, Any], **result: Any) -> dict[str, Any]:
    """The reply of an agent's `/run`."""
    response = {"output": list(output), "status": "completed", "incomplete_details": None}
    return {"response": response, "reward": 1.0, "mask_sample": False, "failure_kind": None, **result}


class GymServer:
    """Head server and the agent `simple`; `answer` makes a reply, or an HTTP status, of the request's body.

    A reply that is None never comes. `servers` are further ones in the configuration, or others in place of its own.
    """

    def __init__(self, answer: Callable[[dict[str, Any]], Any], servers: dict[str, Any] | None = None) -> None:
        self.answer, self.requests, self.configurations = answer, list[dict[str, Any]](), 0
        self.servers = servers or {}
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
        agent = {"host": "127.0.0.1", "port": self.port, "entrypoint": "app.py", "datasets": [{"name": "example"}]}
        agent["resources_server"] = {"type": "resources_servers", "name": "sums"}
        relay = {"agent_server": {"type": "responses_api_agents", "name": "simple"}}
        servers = {
            "simple": {"responses_api_agents": {"simple_agent": agent}},
            "sums": {"resources_servers": {"equivalence_rule": {"entrypoint": "app.py"}}},
            "sums_environment_server": {"environment_servers": {"legacy_agent": relay}},
            "head_server": {"host": "127.0.0.1", "port": self.port},
            "policy_base_url": "http://127.0.0.1:9/v1",
            "policy_model": {"responses_api_models": {"vllm_model": {"base_url": "${policy_base_url}"}}},
            **self.servers,
        }
        return web.json_response(yaml.safe_dump(servers))

    async def _answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        answer = self.answer(body)
        if answer is None:
            await asyncio.Event().wait()
        if isinstance(answer, int):
            return web.json_response("the agent failed", status=answer)
        return web.json_response(answer)
