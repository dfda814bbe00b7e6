"""A replica with the documented API of vLLM."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from tests.jobs.engines.experts import routed_text
from tests.jobs.engines.replica import Replica, fields

COMPLETION = (
    "model prompt echo frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream "
    "stream_options suffix temperature top_p user use_beam_search top_k min_p repetition_penalty length_penalty "
    "stop_token_ids include_stop_str_in_output ignore_eos min_tokens skip_special_tokens "
    "spaces_between_special_tokens truncate_prompt_tokens allowed_token_ids prompt_logprobs prompt_embeds "
    "add_special_tokens response_format structured_outputs priority request_id logits_processors "
    "return_tokens_as_token_ids return_token_ids cache_salt kv_transfer_params vllm_xargs"
).split()
"""Of vLLM's `CompletionRequest`."""


class VLLMServer(Replica):
    """One replica."""

    routes = {
        "/v1/completions": "completions",
        "/pause": "pause",
        "/resume": "resume",
        "/collective_rpc": "collective_rpc",
        "/reset_prefix_cache": "reset_prefix_cache",
    }

    def app(self) -> web.Application:
        app = super().app()
        app.add_routes([web.get("/server_info", self.server_info)])
        if self.options.sleeps:
            app.add_routes([web.post("/sleep", self.sleep), web.post("/wake_up", self.wake_up)])
        return app

    async def server_info(self, request: web.Request) -> web.Response:
        mode = "processed_logprobs" if self.options.processed else "raw_logprobs"
        config: Any = {"model_config": {"model": self.folder, "logprobs_mode": mode}, "instance_id": self.instance_id}
        if request.query.get("config_format", "text") == "text":
            config = f"model='{self.folder}', logprobs_mode={mode}"
        return web.json_response({"vllm_config": config, "vllm_env": {}, "system_env": {}})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await fields(request, COMPLETION)
        if not all(isinstance(token, int) for token in body["prompt"]) or body.get("n", 1) != 1:
            raise web.HTTPBadRequest(text="this server takes one prompt of token ids")
        if body.get("prompt_logprobs") is not None:
            values = await self.scored(body["prompt"])
            entries = [
                {str(token): {"logprob": value}} for token, value in zip(body["prompt"][1:], values, strict=True)
            ]
            return web.json_response({"choices": [{"prompt_logprobs": [None, *entries]}]})
        how = {
            "most": body.get("max_tokens", 16),
            "stops": body.get("stop_token_ids") or [],
            "temperature": body.get("temperature", 1.0),
            "top_p": body.get("top_p", 1.0),
            "top_k": body.get("top_k", 0),
            "seed": body.get("seed"),
        }

        def reply(tokens: list[int], logs: dict[str, list[float]], reason: str, fault: str) -> Any:
            values = logs["processed" if self.options.processed else "raw"]
            choice: dict[str, Any] = {
                "index": 0,
                "text": "",
                "finish_reason": "abort" if fault == "abort" else reason,
                "stop_reason": tokens[-1] if reason == "stop" else None,
                "logprobs": None,
            }
            if body.get("logprobs") is not None:
                choice["logprobs"] = {
                    "tokens": [""] * len(tokens),
                    "token_logprobs": values[: -1 if fault == "short" else None],
                    "top_logprobs": [],
                    "text_offset": [],
                }
            if self.options.experts:
                choice["routed_experts"] = routed_text(self.model, [*body["prompt"], *tokens], fault, npy=True)
            if body.get("return_token_ids"):
                choice |= {"token_ids": tokens, "prompt_token_ids": body["prompt"]}
            return {
                "id": "1",
                "object": "text_completion",
                "created": 0,
                "model": "m",
                "choices": [choice],
                "usage": {},
            }

        return await self.answered(request, body["prompt"], how, reply)

    async def pause(self, request: web.Request) -> web.Response:
        if request.query.get("mode", "abort") not in ("abort", "wait", "keep"):
            raise web.HTTPUnprocessableEntity(text="mode")
        await self.abort()
        self.going.clear()
        return web.json_response({"status": "paused"})

    async def resume(self, request: web.Request) -> web.Response:
        self.going.set()
        return web.json_response({"status": "resumed"})

    async def collective_rpc(self, request: web.Request) -> web.Response:
        body = await fields(request, ["method", "args", "kwargs", "timeout"])
        if body["method"] != "reload_weights" or set(body.get("kwargs", {})) - {"weights_path", "is_checkpoint_format"}:
            raise web.HTTPInternalServerError(text="no such method")
        try:
            await self.load(body["kwargs"]["weights_path"])
        except Exception as error:
            raise web.HTTPInternalServerError(text=str(error)[:200]) from None
        return web.json_response({"results": [None]})

    async def reset_prefix_cache(self, request: web.Request) -> web.Response:
        return web.Response()

    async def sleep(self, request: web.Request) -> web.Response:
        if request.query.get("level", "1") != "2":
            raise web.HTTPInternalServerError(text="this server knows level 2")
        await self.abort()
        self.release(["weights", "kv_cache"])
        return web.Response()

    async def wake_up(self, request: web.Request) -> web.Response:
        self.asleep -= set(request.query.getall("tags", ["weights", "kv_cache"]))
        return web.Response()
