"""SGLang's native API.

Published as "SGLang Native APIs" and "SGLang for RL Systems" (docs.sglang.io), and in `srt/managers/io_struct.py`.
Log-probs of sampled tokens are of the softmax at the request's temperature, before top-k and top-p, unless the server
was started with SGLANG_RETURN_ORIGINAL_LOGPROB.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from roll_batching.engines.protocol import Answer, Malformed, Question, checked
from roll_batching.engines.replicas import Call
from roll_batching.strategy.sampling import GenerationSettings


class SGLang:
    """Requests and replies of an SGLang server."""

    name = "sglang"
    sleeps_with = "--enable-memory-saver"
    health = "/health"

    def call(self, question: Question, settings: GenerationSettings) -> Call:
        """The request for one response. `sampling_seed` counts on servers with --enable-deterministic-inference."""
        sampling: dict[str, Any] = {
            "max_new_tokens": settings.max_new_tokens,
            "stop_token_ids": sorted({settings.eos_token_id, *settings.stop_token_ids}),
            "temperature": 0.0 if settings.greedy else settings.temperature,
            "top_p": settings.top_p,
            "top_k": settings.top_k or -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
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
            raise Malformed(f"{type(error).__name__}: {error} in {str(reply)[:200]}") from None
        if reason not in ("stop", "length"):
            raise Malformed(f"the request ended with {reason!r}")
        given = meta.get("weight_version")
        if given is not None and str(given) != str(version):
            raise Malformed(f"it is of the weights {given!r}, and {str(version)!r} were sent last")
        if [token for _, token in pairs] != tokens and len(pairs) == len(tokens):
            raise Malformed("its log-probs are of other tokens")
        return checked(Answer(tokens=tokens, log_probs=[value for value, _ in pairs]), settings, ended=reason == "stop")

    def update(self, folder: Path, version: int, *, asleep: bool) -> list[Call]:
        """What gives a server new weights; it empties its cache with them. To one that sleeps: room, weights, cache."""
        read = {"model_path": str(folder), "weight_version": str(version), "flush_cache": True}
        before, after = [Call("/pause_generation", {"mode": "abort"})], [Call("/continue_generation", {})]
        if asleep:
            before, room = ([Call("/resume_memory_occupation", {"tags": [tag]})] for tag in ("weights", "kv_cache"))
            after = room + after
        return [*before, Call("/update_weights_from_disk", read), *after]

    def sleep(self) -> list[Call]:
        """What makes a server give its device memory back, weights and cache: it must have no request at work."""
        return [Call("/pause_generation", {"mode": "abort"}), Call("/release_memory_occupation", {})]

    def updated(self, reply: Any) -> str | None:
        """What a server says went wrong; None where nothing did."""
        refused = isinstance(reply, dict) and reply.get("success") is False
        return str(reply.get("message")) if refused else None
