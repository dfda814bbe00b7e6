"""vLLM's OpenAI-compatible server, with its development endpoints for pausing and loading weights.

Sources: "OpenAI-Compatible Server" and "Layerwise reloading" (docs.vllm.ai), and
`entrypoints/openai/completion/protocol.py` and `entrypoints/serve/dev`; the latter needs VLLM_SERVER_DEV_MODE=1.
Log-probs are from the softmax before temperature, top-k and top-p (`--logprobs-mode raw_logprobs`, the default) or
after all three (`processed_logprobs`). `config.engine_rules.wrong_log_probs` returns an error if neither mode suits the
loss.

Replies do not tell the weight version, and a server that restarts loses its updates. A changed `instance_id` in the
server's configuration, which is generated at start (`vllm/config/vllm.py`), shows the restart.
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
    MalformedReply,
    ServerProcess,
    make_result,
    missing_field,
    sampling_parameters,
)
from roll_batching.jobs.engines.replicas import Replicas, limits_of
from roll_batching.jobs.engines.routed_experts import decode_npy
from roll_batching.jobs.processes.requests import Call
from roll_batching.strategy.sampling import GenerationSettings


class VLLM:
    """Requests and replies of a vLLM server."""

    name = "vllm"
    sleep_options = "VLLM_SERVER_DEV_MODE=1 and --enable-sleep-mode"
    health_path = "/health"
    process_path: str | None = "/server_info?config_format=json"

    def generation_call(self, request: GenerationRequest, settings: GenerationSettings) -> Call:
        """The request for one response. Servers return experts by their command line alone."""
        mixture = request.mixture
        size = 0 if mixture is None else mixture.bytes_of(len(request.tokens) + settings.max_new_tokens)
        return Call(
            "/v1/completions",
            {
                **sampling_parameters(settings),
                "prompt": request.tokens,
                "max_tokens": settings.max_new_tokens,
                "seed": request.seed,
                "n": 1,
                "logprobs": 1,
                "return_token_ids": True,
            },
            extra_bytes=size,
        )

    def parse_generation(self, reply: Any, settings: GenerationSettings, version: int) -> GenerationResult:
        """The response in a reply; `version` cannot be checked. Raises MalformedReply."""
        try:
            (choice,) = reply["choices"]
            tokens, reason = list(choice["token_ids"]), choice["finish_reason"]
            log_probs = list(choice["logprobs"]["token_logprobs"])
        except (KeyError, TypeError, ValueError) as error:
            raise missing_field(error, reply) from None
        return make_result(tokens, log_probs, reason, settings)

    def score_call(self, tokens: Sequence[int]) -> Call:
        """The request for log-probs of a prompt: vLLM has them before temperature, in every mode of log-probs."""
        return Call(
            "/v1/completions", {"prompt": list(tokens), "max_tokens": 1, "prompt_logprobs": 0, "temperature": 1.0}
        )

    def parse_scores(self, reply: Any) -> list[float]:
        """The log-probs in a reply; the first token has none."""
        try:
            entries = reply["choices"][0]["prompt_logprobs"][1:]
            return [float(next(iter(entry.values()))["logprob"]) for entry in entries]
        except (KeyError, TypeError, IndexError, ValueError, AttributeError, StopIteration) as error:
            raise missing_field(error, reply) from None

    def parse_experts(self, reply: Any) -> np.ndarray:
        """The experts in a reply, `[tokens - 1, layers, top-k]`."""
        return decode_npy(reply["choices"][0].get("routed_experts"))

    def count_prompt_tokens(self, reply: Any) -> int:
        """Not called: completions take no images."""
        raise NotImplementedError

    def parse_process(self, reply: Any) -> ServerProcess:
        """The server's process. Raises MalformedReply."""
        try:
            config = reply["vllm_config"]
            identity, mode = config["instance_id"], config["model_config"]["logprobs_mode"]
        except (KeyError, TypeError) as error:
            raise missing_field(error, reply) from None
        if not identity:
            raise MalformedReply(f"{self.process_path} has no instance_id, by which a restart of the server is noticed")
        return ServerProcess(identity=str(identity), logprobs_mode=str(mode))

    def before_update(self, *, asleep: bool) -> list[Call]:
        """Aborts and pauses generation; a sleeping server allocates memory for weights."""
        return [Call("/wake_up", None, {"tags": "weights"}) if asleep else Call("/pause", None, {"mode": "abort"})]

    def load_call(self, folder: Path, version: int) -> Call:
        """Loads a model directory."""
        return Call("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})

    def after_update(self, *, asleep: bool) -> list[Call]:
        """Flushes the cache and resumes generation; a sleeping server first allocates memory for its cache.

        Resumes after sleep too: an interrupted update may have left the server paused.
        """
        allocate = [Call("/wake_up", None, {"tags": "kv_cache"})] if asleep else []
        return [*allocate, Call("/reset_prefix_cache"), Call("/resume")]

    def sleep_calls(self) -> list[Call]:
        """Frees the device memory. Level 2 discards the weights instead of offloading them: the next ones differ."""
        return [Call("/sleep", None, {"level": "2"})]

    def error_in(self, reply: Any) -> str | None:
        """The error in a reply; None for success."""
        return str(reply["error"]) if isinstance(reply, dict) and reply.get("error") else None


def vllm_engine(settings: EngineArgs, device: torch.device) -> Replicas:
    """An engine of vLLM servers."""
    return Replicas(settings.urls, VLLM(), limits_of(settings))
