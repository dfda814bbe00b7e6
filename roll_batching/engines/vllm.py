"""vLLM's OpenAI server, and what it has for development: pausing, loading weights.

Published as "OpenAI-Compatible Server" and "Layerwise reloading" (docs.vllm.ai), and in
`entrypoints/openai/completion/protocol.py` and `entrypoints/serve/dev`; the latter needs VLLM_SERVER_DEV_MODE=1.
Log-probs are of the softmax before temperature unless the server was started with `--logprobs-mode
processed_logprobs`, which also counts top-k and top-p. At temperature 1 without either, both are the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from roll_batching.engines.protocol import Answer, Malformed, Question, checked
from roll_batching.engines.replicas import Call
from roll_batching.strategy.sampling import GenerationSettings


class VLLM:
    """Requests and replies of a vLLM server."""

    name = "vllm"
    sleeps_with = "VLLM_SERVER_DEV_MODE=1 and --enable-sleep-mode"
    health = "/health"

    def call(self, question: Question, settings: GenerationSettings) -> Call:
        """The request for one response. All that the model's generation_config.json could change is said."""
        return Call(
            "/v1/completions",
            {
                "prompt": question.tokens,
                "max_tokens": settings.max_new_tokens,
                "stop_token_ids": sorted({settings.eos_token_id, *settings.stop_token_ids}),
                "temperature": 0.0 if settings.greedy else settings.temperature,
                "top_p": settings.top_p,
                "top_k": settings.top_k or -1,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "seed": question.seed,
                "n": 1,
                "logprobs": 1,
                "return_token_ids": True,
            },
        )

    def answer(self, reply: Any, settings: GenerationSettings, version: int) -> Answer:
        """The response in a reply; replies do not say their weights' version. Raises Malformed."""
        try:
            (choice,) = reply["choices"]
            tokens, reason = list(choice["token_ids"]), choice["finish_reason"]
            log_probs = list(choice["logprobs"]["token_logprobs"])
        except (KeyError, TypeError, ValueError) as error:
            raise Malformed(f"{type(error).__name__}: {error} in {str(reply)[:200]}") from None
        if reason not in ("stop", "length"):
            raise Malformed(f"the request ended with {reason!r}")
        return checked(Answer(tokens=tokens, log_probs=log_probs), settings, ended=reason == "stop")

    def update(self, folder: Path, version: int, *, asleep: bool) -> list[Call]:
        """What gives a server new weights, and empties its cache. To one that sleeps: room, weights, cache."""
        read = Call("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
        before, after = [Call("/pause", None, {"mode": "abort"})], [Call("/reset_prefix_cache"), Call("/resume")]
        if asleep:
            before, room = ([Call("/wake_up", None, {"tags": tag})] for tag in ("weights", "kv_cache"))
            after = room + after  # an update that was cut off may have left it paused
        return [*before, read, *after]

    def sleep(self) -> list[Call]:
        """What makes a server give its device memory back. It forgets its weights: it will wake up to others."""
        return [Call("/sleep", None, {"level": "2"})]

    def updated(self, reply: Any) -> str | None:
        """What a server says went wrong; None where nothing did."""
        return str(reply["error"]) if isinstance(reply, dict) and reply.get("error") else None
