"""A replica with the documented API of SGLang."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

from aiohttp import web

from tests.jobs.engines.experts import routed_text
from tests.jobs.engines.receiving import Groups
from tests.jobs.engines.replica import Options, Replica, fields, known

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
GROUP = "master_address master_port rank_offset world_size group_name backend".split()
"""Of `InitWeightsUpdateGroupReqInput`."""
FROM_DISTRIBUTED = (
    "names dtypes shapes group_name flush_cache abort_all_requests weight_version load_format torch_empty_cache"
).split()
"""Of `UpdateWeightsFromDistributedReqInput`."""


class SGLangServer(Replica):
    """One replica."""

    routes = {
        "/generate": "generate",
        "/pause_generation": "pause_generation",
        "/continue_generation": "continue_generation",
        "/update_weights_from_disk": "update_weights_from_disk",
        "/init_weights_update_group": "init_weights_update_group",
        "/update_weights_from_distributed": "update_weights_from_distributed",
        "/destroy_weights_update_group": "destroy_weights_update_group",
        "/release_memory_occupation": "release_memory_occupation",
        "/resume_memory_occupation": "resume_memory_occupation",
    }

    def __init__(self, folder: str, options: Options) -> None:
        super().__init__(folder, options)
        self.groups = Groups(options.ranks)

    def app(self) -> web.Application:
        app = super().app()
        app.add_routes([web.get("/get_server_info" if self.options.older else "/server_info", self.server_info)])
        return app

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await fields(request, GENERATE)
        asked = body.get("sampling_params") or {}
        known(asked, SAMPLING)
        top_k = asked.get("top_k", -1)
        if top_k != -1 and top_k < 1:
            raise web.HTTPBadRequest(
                text=json.dumps({"error": {"message": f"top_k must be -1 or at least 1: {top_k}"}})
            )
        if body.get("logprob_start_len") == 0:
            values = [None, *await self.scored(body["input_ids"])]
            pairs = [[value, token, None] for value, token in zip(values, body["input_ids"], strict=True)]
            return web.json_response({"meta_info": {"input_token_logprobs": pairs}})
        how = {
            "most": asked.get("max_new_tokens", 128),
            "stops": asked.get("stop_token_ids") or [],
            "temperature": asked.get("temperature", 1.0),
            "top_p": asked.get("top_p", 1.0),
            "top_k": top_k,
            "seed": asked.get("sampling_seed"),
        }

        prompt: Any = body["input_ids"]
        length = len(prompt)
        if body.get("image_data"):
            prompt = self.model.with_images(prompt, body["image_data"])
            length = prompt["input_ids"].shape[1]
            self.seen["images"] += len(body["image_data"])

        def reply(tokens: list[int], values: dict[str, list[float]], reason: str, fault: str) -> Any:
            pairs = [[value, token, None] for value, token in zip(values["scaled"], tokens, strict=True)]
            finish = (
                {"type": "stop", "matched": tokens[-1]} if reason == "stop" else {"type": reason, "length": how["most"]}
            )
            meta = {
                "id": "1",
                "finish_reason": {"type": "abort", "message": "aborted"} if fault == "abort" else finish,
                "prompt_tokens": length + (fault == "longer"),
                "completion_tokens": len(tokens),
                "weight_version": "older" if fault == "stale" else self.version,
            }
            if body.get("return_logprob"):
                meta |= {"input_token_logprobs": [], "output_token_logprobs": pairs[: -1 if fault == "short" else None]}
            if self.options.experts and body.get("return_routed_experts"):
                meta["routed_experts"] = routed_text(self.model, [*body["input_ids"], *tokens], fault, npy=False)
            said = [tokens[0] + 1, *tokens[1:]] if fault == "other" else tokens
            return {"text": "", "output_ids": said, "meta_info": meta}

        return await self.answered(request, prompt, how, reply)

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
            if (body.get("load_format") or ("dummy" if self.options.dummy else "auto")) != "dummy":
                await self.load(body["model_path"])
        except Exception as error:
            return web.json_response({"success": False, "message": str(error)[:200]}, status=400)
        if body.get("weight_version") is not None:
            self.version = body["weight_version"]
        return web.json_response({"success": True, "message": "Succeeded to update model weights."})

    async def server_info(self, request: web.Request) -> web.Response:
        sizes = {"tp_size": self.options.ranks, "pp_size": 1, "dp_size": 1, "enable_dp_attention": False}
        return web.json_response({**sizes, "weight_version": self.version, "model_path": self.folder})

    async def init_weights_update_group(self, request: web.Request) -> web.Response:
        body = await fields(request, GROUP)
        self.seen["joined"] += 1
        if "weights_refused" in self.weight_faults.values():
            self.weight_faults.clear()
            return refusal("Failed to initialize custom process group: no NCCL.")
        if (body["backend"], body["world_size"]) != ("gloo", 1 + self.options.ranks):
            return refusal(f"the ranks of this server: {self.options.ranks}, on gloo")
        names = ("master_address", "master_port", "rank_offset", "world_size", "group_name")
        try:
            await asyncio.to_thread(self.groups.join, *(body[name] for name in names))
        except Exception as error:
            return refusal(str(error))
        return web.json_response({"success": True, "message": "Succeeded to initialize custom process group."})

    async def update_weights_from_distributed(self, request: web.Request) -> web.Response:
        body = await fields(request, FROM_DISTRIBUTED)
        if body["group_name"] not in self.groups.by_name:
            os._exit(1)  # an assertion in SGLang's scheduler, with which the server ends
        fault = self.weight_faults.pop(self.seen["received"], None)
        self.seen["received"] += 1
        if fault == "weights_die":
            os._exit(9)
        if fault == "weights_hang":
            await asyncio.sleep(3600)
        try:
            self.check_ready()
            async with self.busy:
                found = await asyncio.to_thread(self.groups.receive, body["group_name"], body["dtypes"], body["shapes"])
                if fault == "weights_misfit":
                    raise ValueError("The size of tensor a (64) must match the size of tensor b (32)")
                self.model.take(dict(zip(body["names"], found, strict=True)))
        except Exception as error:
            return refusal(f"Failed to update parameter online: {error}.")
        bucket = sum(tensor.nbytes for tensor in found)
        self.seen["bytes"] += bucket
        self.seen["largest"] = max(bucket, self.seen["largest"])
        if body.get("weight_version") is not None:
            self.version = body["weight_version"]
            self.seen["updates"] += 1
        return web.json_response({"success": True, "message": "Succeeded to update parameter online."})

    async def destroy_weights_update_group(self, request: web.Request) -> web.Response:
        body = await fields(request, ["group_name"])
        if body["group_name"] not in self.groups.by_name:
            return refusal("The group to be destroyed does not exist.")
        self.groups.leave(body["group_name"])
        self.seen["left"] += 1
        return web.json_response({"success": True, "message": "Succeeded to destroy custom process group."})

    async def release_memory_occupation(self, request: web.Request) -> web.Response:
        body = await fields(request, ["tags"])
        if self.in_flight or not self.options.sleeps:
            raise web.HTTPBadRequest(text="requests are running" if self.in_flight else "no memory saver")
        self.release(body.get("tags") or ["weights", "kv_cache"])
        return web.json_response({"success": True, "message": ""})

    async def resume_memory_occupation(self, request: web.Request) -> web.Response:
        body = await fields(request, ["tags"])
        tags = set(body.get("tags") or ["weights", "kv_cache"])
        if "weights" in tags & self.asleep:
            await asyncio.to_thread(self.model.make_room, self.folder)
        self.asleep -= tags
        return web.json_response({"success": True, "message": ""})


def refusal(message: str) -> web.Response:
    return web.json_response({"success": False, "message": message}, status=400)
