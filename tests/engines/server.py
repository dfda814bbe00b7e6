"""Servers that speak as SGLang and vLLM document it, over a small transformers model on the CPU, for tests and demo.

    python -m tests.engines.server MODEL_DIRECTORY --kind sglang --replicas 2 --port 30000

They take the fields that the engines' request models have and refuse all others, sample with a seed per request, load
new weights from a directory, and answer nothing while they are paused. Faults are ordered at /_fault, a path that no
engine has: {"kind": "slow" | "500" | "cut" | "short" | "other" | "stale" | "abort", "times": n}; {"kind": "die"} closes
the port. /_seen tells what came.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import json
import math
import os
import threading
from typing import Any

import torch
from aiohttp import web

GENERATE = (
    "rid session_id text input_ids input_embeds image_data video_data audio_data sampling_params return_logprob "
    "logprob_start_len top_logprobs_num token_ids_logprob return_text_in_logprobs stream log_metrics "
    "return_hidden_states return_routed_experts lora_path lora_id custom_logit_processor priority extra_key no_logs"
).split()
"""Of `GenerateReqInput`."""
SAMPLING = (
    "max_new_tokens stop stop_token_ids stop_regex temperature top_p top_k min_p frequency_penalty presence_penalty "
    "repetition_penalty min_new_tokens n json_schema regex ebnf structural_tag ignore_eos skip_special_tokens "
    "spaces_between_special_tokens no_stop_trim custom_params stream_interval logit_bias sampling_seed"
).split()
"""Of `SamplingParams`, SGLang's."""
FROM_DISK = (
    "model_path load_format abort_all_requests weight_version is_async torch_empty_cache keep_pause "
    "recapture_cuda_graph token_step flush_cache manifest"
).split()
"""Of `UpdateWeightFromDiskReqInput`."""
COMPLETION = (
    "model prompt echo frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream "
    "stream_options suffix temperature top_p user use_beam_search top_k min_p repetition_penalty length_penalty "
    "stop_token_ids include_stop_str_in_output ignore_eos min_tokens skip_special_tokens "
    "spaces_between_special_tokens truncate_prompt_tokens allowed_token_ids prompt_logprobs prompt_embeds "
    "add_special_tokens response_format structured_outputs priority request_id logits_processors "
    "return_tokens_as_token_ids return_token_ids cache_salt kv_transfer_params vllm_xargs"
).split()
"""Of vLLM's `CompletionRequest`."""

_LOADING = threading.Lock()
"""Transformers reads one model at a time: side by side, tied weights of one stayed as they were made, at random."""


class Model:
    """Weights and how they sample."""

    def __init__(self, folder: str) -> None:
        self.load(folder)

    def load(self, folder: str) -> None:
        from transformers import AutoModelForCausalLM

        with _LOADING:
            self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        ends = self.model.generation_config.eos_token_id
        self.ends = set(ends if isinstance(ends, list) else [] if ends is None else [ends])

    @torch.no_grad()
    def sample(self, prompt: list[int], how: dict[str, Any]) -> tuple[list[int], list[float], list[float], str]:
        """Tokens; their log-probs at the temperature and without it; why it ended."""
        generator = torch.Generator().manual_seed(how["seed"] or 0)
        stops = {*self.ends, *how["stops"]}
        tokens, scaled, raw = [], [], []
        rows, cache = torch.tensor([prompt]), None
        while len(tokens) < how["most"]:
            made = self.model(rows, past_key_values=cache, use_cache=True)
            cache, logits = made.past_key_values, made.logits[0, -1].float()
            hot = (logits / (how["temperature"] or 1.0)).log_softmax(-1)
            token = int(hot.argmax()) if not how["temperature"] else self._draw(hot, how, generator)
            tokens.append(token)
            scaled.append(float(hot[token]))
            raw.append(float(logits.log_softmax(-1)[token]))
            if token in stops:
                return tokens, scaled, raw, "stop"
            rows = torch.tensor([[token]])
        return tokens, scaled, raw, "length"

    @staticmethod
    def _draw(log_probs: torch.Tensor, how: dict[str, Any], generator: torch.Generator) -> int:
        kept = log_probs.clone()
        if how["top_k"] and how["top_k"] > 0:
            kept[kept < kept.topk(min(how["top_k"], len(kept))).values[-1]] = -math.inf
        if how["top_p"] < 1:
            ordered, index = kept.softmax(-1).sort(descending=True)
            kept[index[ordered.cumsum(-1) - ordered >= how["top_p"]]] = -math.inf
        return int(torch.multinomial(kept.exp(), 1, generator=generator))


class Server:
    """One replica. `sleeps`: it was started so that it can give its memory back."""

    def __init__(self, folder: str, processed: bool, sleeps: bool) -> None:
        self.model, self.processed, self.sleeps = Model(folder), processed, sleeps
        self.asleep: set[str] = set()
        """Of "weights" and "kv_cache", what has no memory at the moment."""
        self.version = "default"
        self.going = asyncio.Event()
        self.going.set()
        self.busy = asyncio.Lock()
        self.seen: collections.Counter[str] = collections.Counter()
        self.in_flight = self.most_in_flight = 0
        self.requests: set[asyncio.Task[Any]] = set()
        self.prompts: list[list[int]] = []
        self.faults: list[str] = []
        self.close: Any = None

    def app(self, kind: str) -> web.Application:
        app = web.Application(client_max_size=1 << 30)
        common = [web.get("/health", self.health), web.post("/_fault", self.fault), web.get("/_seen", self.tell)]
        sglang = [
            web.post("/generate", self.generate),
            web.post("/pause_generation", self.pause_generation),
            web.post("/continue_generation", self.continue_generation),
            web.post("/update_weights_from_disk", self.update_weights_from_disk),
            web.post("/release_memory_occupation", self.release_memory_occupation),
            web.post("/resume_memory_occupation", self.resume_memory_occupation),
        ]
        vllm = [
            web.post("/v1/completions", self.completions),
            web.post("/pause", self.pause),
            web.post("/resume", self.resume),
            web.post("/collective_rpc", self.collective_rpc),
            web.post("/reset_prefix_cache", self.reset_prefix_cache),
            *([web.post("/sleep", self.sleep), web.post("/wake_up", self.wake_up)] if self.sleeps else []),
        ]
        app.add_routes(common + (sglang if kind == "sglang" else vllm))
        return app

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def fault(self, request: web.Request) -> web.Response:
        order = await request.json()
        if order["kind"] == "die":
            asyncio.get_running_loop().call_later(0.05, lambda: asyncio.ensure_future(self.close()))
        else:
            self.faults += [order["kind"]] * order.get("times", 1)
        return web.Response()

    async def tell(self, request: web.Request) -> web.Response:
        return web.json_response(
            {**self.seen, "most_in_flight": self.most_in_flight, "version": self.version, "prompts": self.prompts}
        )

    # ---- SGLang

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await fields(request, GENERATE)
        asked = body.get("sampling_params") or {}
        known(asked, SAMPLING)
        top_k = asked.get("top_k", -1)
        if top_k != -1 and top_k < 1:
            raise web.HTTPBadRequest(
                text=json.dumps({"error": {"message": f"top_k must be -1 or at least 1: {top_k}"}})
            )
        how = {
            "most": asked.get("max_new_tokens", 128),
            "stops": asked.get("stop_token_ids") or [],
            "temperature": asked.get("temperature", 1.0),
            "top_p": asked.get("top_p", 1.0),
            "top_k": top_k,
            "seed": asked.get("sampling_seed"),
        }

        def reply(tokens: list[int], scaled: list[float], raw: list[float], reason: str, fault: str) -> Any:
            pairs = [[value, token, None] for value, token in zip(scaled, tokens, strict=True)]
            finish = (
                {"type": "stop", "matched": tokens[-1]} if reason == "stop" else {"type": reason, "length": how["most"]}
            )
            meta = {
                "id": "1",
                "finish_reason": {"type": "abort", "message": "aborted"} if fault == "abort" else finish,
                "prompt_tokens": len(body["input_ids"]),
                "completion_tokens": len(tokens),
                "weight_version": "older" if fault == "stale" else self.version,
            }
            if body.get("return_logprob"):
                meta |= {"input_token_logprobs": [], "output_token_logprobs": pairs[: -1 if fault == "short" else None]}
            said = [tokens[0] + 1, *tokens[1:]] if fault == "other" else tokens
            return {"text": "", "output_ids": said, "meta_info": meta}

        return await self.answered(request, body["input_ids"], how, reply)

    async def pause_generation(self, request: web.Request) -> web.Response:
        body = await fields(request, ["mode"])
        if body.get("mode", "abort") not in ("abort", "retract", "in_place"):
            raise web.HTTPBadRequest(text="mode")
        await self.abort()
        self.going.clear()
        return web.json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def continue_generation(self, request: web.Request) -> web.Response:
        await fields(request, ["torch_empty_cache"])
        self.going.set()
        return web.json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def update_weights_from_disk(self, request: web.Request) -> web.Response:
        body = await fields(request, FROM_DISK)
        try:
            await self.load(body["model_path"])
        except Exception as error:
            return web.json_response({"success": False, "message": str(error)[:200]}, status=400)
        if body.get("weight_version") is not None:
            self.version = body["weight_version"]
        return web.json_response({"success": True, "message": "Succeeded to update model weights."})

    async def release_memory_occupation(self, request: web.Request) -> web.Response:
        body = await fields(request, ["tags"])
        if self.in_flight or not self.sleeps:
            raise web.HTTPBadRequest(text="requests are running" if self.in_flight else "no memory saver")
        self.release(body.get("tags") or ["weights", "kv_cache"])
        return web.json_response({"success": True, "message": ""})

    async def resume_memory_occupation(self, request: web.Request) -> web.Response:
        body = await fields(request, ["tags"])
        self.asleep -= set(body.get("tags") or ["weights", "kv_cache"])
        return web.json_response({"success": True, "message": ""})

    # ---- vLLM

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await fields(request, COMPLETION)
        if not all(isinstance(token, int) for token in body["prompt"]) or body.get("n", 1) != 1:
            raise web.HTTPBadRequest(text="this server takes one prompt of token ids")
        how = {
            "most": body.get("max_tokens", 16),
            "stops": body.get("stop_token_ids") or [],
            "temperature": body.get("temperature", 1.0),
            "top_p": body.get("top_p", 1.0),
            "top_k": body.get("top_k", 0),
            "seed": body.get("seed"),
        }

        def reply(tokens: list[int], scaled: list[float], raw: list[float], reason: str, fault: str) -> Any:
            values = scaled if self.processed else raw
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

    # ---- both

    async def abort(self) -> None:
        """Ends all requests, as pausing and sleeping do by default."""
        for task in list(self.requests):
            task.cancel()
        await asyncio.sleep(0.05)

    def release(self, tags: list[str]) -> None:
        """What was in that memory is forgotten."""
        self.asleep |= set(tags)
        self.seen["sleeps"] += 1
        if "weights" in tags:
            self.model.model = None

    async def load(self, folder: str) -> None:
        if "weights" in self.asleep:
            raise RuntimeError("there is no memory for weights")
        if self.going.is_set() and not self.asleep:
            raise RuntimeError("weights are changed while generation goes on")
        async with self.busy:
            await asyncio.to_thread(self.model.load, folder)
        self.seen["updates"] += 1

    async def answered(self, request: web.Request, prompt: list[int], how: dict[str, Any], reply: Any) -> web.Response:
        self.seen["requests"] += 1
        self.prompts.append(prompt)
        self.in_flight += 1
        self.most_in_flight = max(self.in_flight, self.most_in_flight)
        task = asyncio.current_task()
        assert task is not None
        self.requests.add(task)
        try:
            fault = self.faults.pop(0) if self.faults else ""
            if fault == "slow":
                await asyncio.sleep(3600)
            if fault == "500":
                raise web.HTTPInternalServerError(text="out of memory")
            if fault == "cut":
                assert request.transport is not None
                request.transport.abort()
            await self.going.wait()
            if self.asleep:
                raise web.HTTPInternalServerError(text=f"asleep: {sorted(self.asleep)}")
            async with self.busy:
                made = await asyncio.to_thread(self.model.sample, prompt, how)
            return web.json_response(reply(*made, fault))
        finally:
            self.in_flight -= 1
            self.requests.discard(task)


async def fields(request: web.Request, names: list[str]) -> dict[str, Any]:
    """The request's JSON object. A field that the engine does not have is refused with 400, as a test of the client."""
    body = await request.json() if request.can_read_body else {}
    known(body, names)
    return body


def known(body: dict[str, Any], names: list[str]) -> None:
    extra = sorted(set(body) - set(names))
    if extra:
        raise web.HTTPBadRequest(text=json.dumps({"error": {"message": f"unknown fields: {extra}"}}))


async def serve(
    folder: str, kind: str, ports: list[int], processed: bool, sleeps: bool, host: str = "127.0.0.1"
) -> None:
    """Serves for ever; tells the URLs in one line."""
    urls = []
    for port in ports:
        server = Server(folder, processed, sleeps)
        runner = web.AppRunner(server.app(kind), shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, host, port)
        await site.start()
        server.close = runner.cleanup
        urls.append(f"http://{host}:{runner.addresses[0][1]}")
    print(json.dumps(urls), flush=True)
    await asyncio.Event().wait()


def end_with(parent: int) -> None:
    """Ends this process when the one that it works for is gone."""
    while os.getppid() == parent:
        threading.Event().wait(0.5)
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--kind", choices=("sglang", "vllm"), default="sglang")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--port", type=int, default=0, help="of the first; the others follow. 0: any")
    parser.add_argument("--processed", action="store_true", help="vllm: as --logprobs-mode processed_logprobs")
    parser.add_argument("--sleeps", action="store_true", help="as --enable-sleep-mode, --enable-memory-saver")
    args = parser.parse_args()
    torch.set_num_threads(1)
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    ports = [args.port + n if args.port else 0 for n in range(args.replicas)]
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(args.model, args.kind, ports, args.processed, args.sleeps))


if __name__ == "__main__":
    main()
