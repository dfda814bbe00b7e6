"""SGLang's native API.

Published as "SGLang Native APIs" and "SGLang for RL Systems" (docs.sglang.io), and in `srt/managers/io_struct.py`.
Log-probs of sampled tokens are of the softmax at the request's temperature, before top-k and top-p; of greedy responses
at temperature 1. A server with SGLANG_RETURN_ORIGINAL_LOGPROB in its environment has all of them at temperature 1, and
tells nobody: the job starts its own without, and `config.engine_rules` takes servers at URLs to be without, too.

Weights over a process group: `srt/model_executor/model_runner.py` (0.5) or `weight_updater.py` (later). A server's
process takes the rank `rank_offset` + its tensor-parallel rank, whatever its stage, so that stages cannot join; it
receives one broadcast per name, and loads them all when the last is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from roll_batching.jobs.engines.dialect import Call, Meeting, not_understood, response, sampling_words
from roll_batching.jobs.engines.protocol import Answer, Malformed, Question, ServerProcess
from roll_batching.strategy.sampling import GenerationSettings


class SGLang:
    """Requests and replies of an SGLang server."""

    name = "sglang"
    sleeps_with = "--enable-memory-saver"
    health = "/health"
    about_process: str | None = None
    about: tuple[str, ...] = ("/server_info", "/get_server_info")  # the second in older versions

    def call(self, question: Question, settings: GenerationSettings) -> Call:
        """The request for one response. `sampling_seed` counts on servers with --enable-deterministic-inference."""
        sampling = {
            **sampling_words(settings),
            "max_new_tokens": settings.max_new_tokens,
            "sampling_seed": question.seed,
        }
        return Call("/generate", {"input_ids": question.tokens, "sampling_params": sampling, "return_logprob": True})

    def answer(self, reply: Any, settings: GenerationSettings, version: int) -> Answer:
        """The response in a reply. Raises Malformed, also where it is of other weights than `version`."""
        try:
            meta, tokens = reply["meta_info"], list(reply["output_ids"])
            reason = meta["finish_reason"]["type"]
            pairs = [(entry[0], entry[1]) for entry in meta["output_token_logprobs"]]
        except (KeyError, TypeError, IndexError) as error:
            raise not_understood(error, reply) from None
        given = meta.get("weight_version")
        if given is not None and str(given) != str(version):
            raise Malformed(f"it is of the weights {given!r}, and {str(version)!r} were sent last")
        if [token for _, token in pairs] != tokens and len(pairs) == len(tokens):
            raise Malformed("its log-probs are of other tokens")
        return response(tokens, [value for value, _ in pairs], reason, settings)

    def process(self, about: Any) -> ServerProcess:
        """Not asked: its answers tell the version of their weights."""
        raise NotImplementedError

    def before_update(self, *, asleep: bool) -> list[Call]:
        """It ends what it generates, and waits; one that sleeps, and so waits, gets room for weights."""
        if asleep:
            return [Call("/resume_memory_occupation", {"tags": ["weights"]})]
        return [Call("/pause_generation", {"mode": "abort"})]

    def read(self, folder: Path, version: int) -> Call:
        """It reads a model directory, whatever it was started with (`--load-format dummy`), and empties its cache."""
        body = {"model_path": str(folder), "load_format": "auto", "weight_version": str(version), "flush_cache": True}
        return Call("/update_weights_from_disk", body)

    def after_update(self, *, asleep: bool) -> list[Call]:
        """It goes on; one that sleeps gets room for its cache before."""
        room = [Call("/resume_memory_occupation", {"tags": ["kv_cache"]})] if asleep else []
        return [*room, Call("/continue_generation", {})]

    def sleep(self) -> list[Call]:
        """What makes a server give its device memory back, weights and cache: it must have no request at work."""
        return [Call("/pause_generation", {"mode": "abort"}), Call("/release_memory_occupation", {})]

    def updated(self, reply: Any) -> str | None:
        """What a server says went wrong; None where nothing did."""
        refused = isinstance(reply, dict) and reply.get("success") is False
        return str(reply.get("message")) if refused else None

    # ---- weights over a process group

    def ranks(self, about: Any) -> int:
        """Its tensor-parallel size. Raises Malformed for a server of several stages or replicas."""
        try:
            tensor, stages, replicas = (int(about[name]) for name in ("tp_size", "pp_size", "dp_size"))
            attention = bool(about.get("enable_dp_attention"))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise not_understood(error, about) from None
        if stages > 1 or (replicas > 1 and not attention):
            raise Malformed(
                f"a server of pp_size={stages} and dp_size={replicas} cannot join a group for weights: SGLang numbers "
                "its processes by their tensor-parallel rank alone"
            )
        return tensor

    def weights(self, about: Any) -> str:
        """The version that it was told last."""
        return str(about.get("weight_version"))

    def join(self, meeting: Meeting) -> Call:
        """What makes its processes join a group."""
        return Call(
            "/init_weights_update_group",
            {
                "master_address": meeting.address,
                "master_port": meeting.port,
                "rank_offset": 1,
                "world_size": meeting.size,
                "group_name": meeting.group,
                "backend": meeting.backend,
            },
        )

    def receive(self, tensors: Sequence[tuple[str, torch.Tensor]], group: str, version: int | None) -> Call:
        """What makes it take these; with the last of a version it empties its cache."""
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

    def leave(self, group: str) -> Call:
        """What makes its processes forget a group."""
        return Call("/destroy_weights_update_group", {"group_name": group})
