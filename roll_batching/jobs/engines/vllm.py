"""vLLM's OpenAI server, and what it has for development: pausing, loading weights.

Published as "OpenAI-Compatible Server" and "Layerwise reloading" (docs.vllm.ai), and in
`entrypoints/openai/completion/protocol.py` and `entrypoints/serve/dev`; the latter needs VLLM_SERVER_DEV_MODE=1.
Log-probs are of the softmax before temperature, top-k and top-p (`--logprobs-mode raw_logprobs`, the default) or after
all three (`processed_logprobs`). `config.engine_rules.wrong_log_probs` says when neither is what a loss needs.

Answers do not say which weights they are of, and a server that was started again has its first ones: `instance_id` of
its configuration, which it makes when it starts (`vllm/config/vllm.py`), tells one process from the next.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from roll_batching.jobs.engines.dialect import Call, not_understood, response, sampling_words
from roll_batching.jobs.engines.protocol import Answer, Malformed, Question, ServerProcess
from roll_batching.strategy.sampling import GenerationSettings


class VLLM:
    """Requests and replies of a vLLM server."""

    name = "vllm"
    sleeps_with = "VLLM_SERVER_DEV_MODE=1 and --enable-sleep-mode"
    health = "/health"
    about_process: str | None = "/server_info?config_format=json"

    def call(self, question: Question, settings: GenerationSettings) -> Call:
        """The request for one response."""
        return Call(
            "/v1/completions",
            {
                **sampling_words(settings),
                "prompt": question.tokens,
                "max_tokens": settings.max_new_tokens,
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
            raise not_understood(error, reply) from None
        return response(tokens, log_probs, reason, settings)

    def process(self, about: Any) -> ServerProcess:
        """The process that answered. Raises Malformed."""
        try:
            config = about["vllm_config"]
            identity, mode = config["instance_id"], config["model_config"]["logprobs_mode"]
        except (KeyError, TypeError) as error:
            raise not_understood(error, about) from None
        if not identity:
            raise Malformed(f"{self.about_process} has no instance_id, by which a restart of the server is noticed")
        return ServerProcess(identity=str(identity), logprobs_mode=str(mode))

    def before_update(self, *, asleep: bool) -> list[Call]:
        """It ends what it generates, and waits; one that sleeps gets room for weights."""
        return [Call("/wake_up", None, {"tags": "weights"}) if asleep else Call("/pause", None, {"mode": "abort"})]

    def read(self, folder: Path, version: int) -> Call:
        """It reads a model directory."""
        return Call("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})

    def after_update(self, *, asleep: bool) -> list[Call]:
        """It empties its cache and goes on; one that sleeps gets room for its cache before.

        It goes on after sleep too: an update that was cut off may have left it paused.
        """
        room = [Call("/wake_up", None, {"tags": "kv_cache"})] if asleep else []
        return [*room, Call("/reset_prefix_cache"), Call("/resume")]

    def sleep(self) -> list[Call]:
        """What makes a server give its device memory back. It forgets its weights: it will wake up to others."""
        return [Call("/sleep", None, {"level": "2"})]

    def updated(self, reply: Any) -> str | None:
        """What a server says went wrong; None where nothing did."""
        return str(reply["error"]) if isinstance(reply, dict) and reply.get("error") else None
