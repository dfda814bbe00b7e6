"""Builds requests and reads replies of SGLang's native API.

Sources: "SGLang Native APIs" and "SGLang for RL Systems" (docs.sglang.io), and `srt/managers/io_struct.py`.
Log-probs of sampled tokens are from the softmax at the request's temperature, before top-k and top-p; log-probs
of greedy responses are at temperature 1. With SGLANG_RETURN_ORIGINAL_LOGPROB in a server's environment all are at
temperature 1, and replies do not show it: the job starts its servers without, and `config.engine_rules` assumes the
same of servers that it does not start.

A prompt with images is sent with one token per image: the server decodes it, and its processor repeats the tokens of
images (`srt/multimodal/processors/base_processor.py`). `prompt_tokens` of the reply tells how many it has made.

Weights over a process group: `srt/model_executor/model_runner.py` (0.5) or `weight_updater.py` (later). A server's
process gets rank `rank_offset` + its tensor-parallel rank, whatever its pipeline stage, so a server with several stages
cannot join. It receives one broadcast per name, and loads all tensors after the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from roll_batching.jobs.config.worker import EngineArgs
from roll_batching.jobs.engines.protocol import (
    GenerationRequest,
    GenerationResult,
    GroupRendezvous,
    MalformedReply,
    ServerProcess,
    make_result,
    missing_field,
    sampling_parameters,
)
from roll_batching.jobs.engines.replicas import Replicas, limits_of
from roll_batching.jobs.engines.routed_experts import decode_int32
from roll_batching.jobs.processes.requests import Call, excerpt
from roll_batching.strategy.sampling import GenerationSettings


class SGLang:
    """Requests and replies of an SGLang server."""

    name = "sglang"
    sleep_options = "--enable-memory-saver"
    health_path = "/health"
    process_path: str | None = None
    info_paths: tuple[str, ...] = ("/server_info", "/get_server_info")  # the second in older versions

    def generation_call(self, request: GenerationRequest, settings: GenerationSettings) -> Call:
        """The request for one response. Servers use `sampling_seed` with --enable-deterministic-inference only."""
        sampling = {
            **sampling_parameters(settings),
            "max_new_tokens": settings.max_new_tokens,
            "sampling_seed": request.seed,
        }
        body: dict[str, Any] = {"input_ids": request.tokens, "sampling_params": sampling, "return_logprob": True}
        if request.images is not None:
            body |= {"input_ids": request.images.tokens, "image_data": list(request.images.data)}
        if request.mixture is None:
            return Call("/generate", body)
        size = request.mixture.bytes_of(len(request.tokens) + settings.max_new_tokens)
        return Call("/generate", {**body, "return_routed_experts": True}, extra_bytes=size)

    def parse_generation(self, reply: Any, settings: GenerationSettings, version: int) -> GenerationResult:
        """The response in a reply. Raises MalformedReply, also when its weights are not `version`."""
        try:
            meta, tokens = reply["meta_info"], list(reply["output_ids"])
            reason = meta["finish_reason"]["type"]
            pairs = [(entry[0], entry[1]) for entry in meta["output_token_logprobs"]]
        except (KeyError, TypeError, IndexError) as error:
            raise missing_field(error, reply) from None
        actual = meta.get("weight_version")
        if actual is not None and str(actual) != str(version):
            raise MalformedReply(f"it is of the weights {actual!r}, and {str(version)!r} were sent last")
        if [token for _, token in pairs] != tokens and len(pairs) == len(tokens):
            raise MalformedReply("its log-probs are of other tokens")
        return make_result(tokens, [value for value, _ in pairs], reason, settings)

    def score_call(self, tokens: Sequence[int]) -> Call:
        """The request for log-probs of a prompt, from its first token on."""
        sampling = {"temperature": 1.0, "max_new_tokens": 1}
        body = {"input_ids": list(tokens), "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
        return Call("/generate", body)

    def parse_scores(self, reply: Any) -> list[float]:
        """The log-probs in a reply; the first token has none."""
        try:
            return [float(entry[0]) for entry in reply["meta_info"]["input_token_logprobs"][1:]]
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise missing_field(error, reply) from None

    def count_prompt_tokens(self, reply: Any) -> int:
        """Tokens of the prompt that the server computed. Raises MalformedReply."""
        try:
            return int(reply["meta_info"]["prompt_tokens"])
        except (KeyError, TypeError, ValueError) as error:
            raise missing_field(error, reply) from None

    def parse_experts(self, reply: Any) -> np.ndarray:
        """The experts in a reply, flat."""
        meta = reply["meta_info"]
        if meta.get("routed_experts_start_len"):
            raise MalformedReply(f"its routed_experts begin at token {excerpt(meta['routed_experts_start_len'], 40)}")
        return decode_int32(meta.get("routed_experts"))

    def parse_process(self, reply: Any) -> ServerProcess:
        """Not called: replies name the version of their weights."""
        raise NotImplementedError

    def before_update(self, *, asleep: bool) -> list[Call]:
        """Aborts and pauses generation; a sleeping server, which is paused, allocates memory for weights."""
        if asleep:
            return [Call("/resume_memory_occupation", {"tags": ["weights"]})]
        return [Call("/pause_generation", {"mode": "abort"})]

    def load_call(self, folder: Path, version: int) -> Call:
        """Loads a model directory, also after a start with `--load-format dummy`, and flushes the cache."""
        body = {"model_path": str(folder), "load_format": "auto", "weight_version": str(version), "flush_cache": True}
        return Call("/update_weights_from_disk", body)

    def after_update(self, *, asleep: bool) -> list[Call]:
        """Continues generation; a sleeping server first allocates memory for its cache."""
        allocate = [Call("/resume_memory_occupation", {"tags": ["kv_cache"]})] if asleep else []
        return [*allocate, Call("/continue_generation", {})]

    def sleep_calls(self) -> list[Call]:
        """Frees weights and cache. The server must have no running request, so generation is aborted first."""
        return [Call("/pause_generation", {"mode": "abort"}), Call("/release_memory_occupation", {})]

    def error_in(self, reply: Any) -> str | None:
        """The error in a reply; None for success."""
        failed = isinstance(reply, dict) and reply.get("success") is False
        return str(reply.get("message")) if failed else None

    # ---- weights over a process group

    def world_size(self, info: Any) -> int:
        """The server's tensor-parallel size. Raises MalformedReply for several pipeline stages or replicas."""
        try:
            tp_size, stages, replicas = (int(info[name]) for name in ("tp_size", "pp_size", "dp_size"))
            # Then `dp_size` splits the tensor-parallel ranks, and adds none.
            has_dp_attention = bool(info.get("enable_dp_attention"))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise missing_field(error, info) from None
        if tp_size < 1:
            raise MalformedReply(f"its tp_size is {tp_size}, not a number of 1 or more")
        if stages > 1 or (replicas > 1 and not has_dp_attention):
            raise MalformedReply(
                f"a server of pp_size={stages} and dp_size={replicas} cannot join a group for weights: SGLang numbers "
                "its processes by their tensor-parallel rank alone"
            )
        return tp_size

    def weight_version(self, info: Any) -> str:
        """Version of the last weights sent."""
        return str(info.get("weight_version")) if isinstance(info, dict) else ""

    def join_call(self, rendezvous: GroupRendezvous) -> Call:
        """Makes the server's processes join a process group."""
        return Call(
            "/init_weights_update_group",
            {
                "master_address": rendezvous.address,
                "master_port": rendezvous.port,
                "rank_offset": 1,
                "world_size": rendezvous.size,
                "group_name": rendezvous.group,
                "backend": rendezvous.backend,
            },
        )

    def receive_call(self, tensors: Sequence[tuple[str, torch.Tensor]], group: str, version: int | None) -> Call:
        """Receives the tensors; the last ones of a version also flush the cache."""
        body: dict[str, Any] = {
            "names": [name for name, _ in tensors],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors],
            "shapes": [list(tensor.shape) for _, tensor in tensors],
            "group_name": group,
            "flush_cache": version is not None,
        }
        if version is not None:
            body["weight_version"] = str(version)
        return Call("/update_weights_from_distributed", body)

    def leave_call(self, group: str) -> Call:
        """Destroys a process group in the server's processes."""
        return Call("/destroy_weights_update_group", {"group_name": group})


def sglang_engine(settings: EngineArgs, device: torch.device) -> Replicas:
    """An engine of SGLang servers."""
    return Replicas(settings.urls, SGLang(), limits_of(settings))
