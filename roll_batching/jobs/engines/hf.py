"""Engine that runs `generate` of transformers in this process: slow, for comparison with other engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from roll_batching.errors import EngineError
from roll_batching.jobs.config.worker import EngineArgs
from roll_batching.jobs.engines.probe import GapLimit, Probe
from roll_batching.jobs.engines.protocol import GenerationRequest, GenerationResult, check_result
from roll_batching.strategy.sampling import GenerationSettings

_BATCH_SIZE = 32
"""Requests per call of transformers."""
_TIMEOUT = 24 * 3600.0
"""Seconds; generation in this process cannot be interrupted."""


class HFEngine:
    """`generate` of transformers, on `device`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.version = 0
        self._model: Any = None
        self._gap_limit = GapLimit()

    @property
    def live(self) -> Mapping[str, None]:
        """One replica, once it has weights."""
        return {} if self._model is None else {"transformers": None}

    def set_live(self, live: Mapping[str, Any], version: int) -> None:
        """Does nothing: every process loads weights into its local model."""

    def metrics(self) -> dict[str, float]:
        """No metrics."""
        return {}

    def generation_timeout(self, requests: int) -> float:
        """A day, since the time is not known and this process cannot be interrupted."""
        return _TIMEOUT

    def update_timeout(self) -> float:
        """A day, since the time is not known and this process cannot be interrupted."""
        return _TIMEOUT

    def sleep(self) -> None:
        """Deletes the model."""
        self._model = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def update_weights(self, folder: Path, version: int, *, asleep: bool = False) -> None:
        """Loads the model directory `folder`. Raises EngineError."""
        from transformers import AutoModelForCausalLM, GenerationConfig

        self._model = None
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(str(folder), dtype="auto")
        except Exception as error:
            raise EngineError(f"transformers cannot read {folder}: {type(error).__name__}: {error}") from error
        # The directory's generation_config.json would set parameters that we do not pass (repetition_penalty, min_p).
        model.generation_config = GenerationConfig()
        self._model, self.version = model.to(self.device).eval(), version

    @torch.no_grad()
    def check_weights(self, probe: Probe) -> None:
        """Compares the log-probs of `probe`. Raises EngineError when they are of other weights."""
        tokens = torch.tensor([probe.tokens], device=self.device)
        # Logits at a position are of the next token: the last ones have none, and the first token has no log-prob.
        log_probs = self._model(input_ids=tokens).logits[0, :-1].float().log_softmax(-1)
        gap = probe.gap(log_probs.gather(1, tokens[0, 1:, None])[:, 0].tolist())
        self._gap_limit.check(gap, probe.largest_gap)

    @torch.no_grad()
    def generate(self, requests: Sequence[GenerationRequest], settings: GenerationSettings) -> list[GenerationResult]:
        """Results in the order of `requests`; each batch of requests uses the seed of its first one."""
        if requests and self._model is None:
            raise EngineError("transformers has no weights yet: update_weights comes first")
        batches = [requests[start : start + _BATCH_SIZE] for start in range(0, len(requests), _BATCH_SIZE)]
        devices = [self.device] if self.device.type == "cuda" else []
        results = []
        for batch in batches:
            with torch.random.fork_rng(devices=devices):
                torch.manual_seed(batch[0].seed)
                results += self._generate_batch(batch, settings)
        return results

    def _generate_batch(
        self, requests: Sequence[GenerationRequest], settings: GenerationSettings
    ) -> list[GenerationResult]:
        from transformers import GenerationConfig

        stops = sorted({settings.eos_token_id, *settings.stop_token_ids})
        width = max(len(request.tokens) for request in requests)
        pads = [width - len(request.tokens) for request in requests]
        # `generate` continues at the end of each row, so prompts are padded on the left.
        prompts = [[stops[0]] * pad + request.tokens for pad, request in zip(pads, requests, strict=True)]
        mask = [[0] * pad + [1] * (width - pad) for pad in pads]
        sampling: dict[str, Any] = {"do_sample": False}
        if not settings.greedy:
            sampling = {
                "do_sample": True,
                "temperature": settings.temperature,
                "top_p": settings.top_p,
                "top_k": settings.top_k,
            }
        config = GenerationConfig(
            max_new_tokens=settings.max_new_tokens, eos_token_id=stops, pad_token_id=stops[0], **sampling
        )
        output = self._model.generate(
            input_ids=torch.tensor(prompts, device=self.device),
            attention_mask=torch.tensor(mask, device=self.device),
            generation_config=config,
            output_logits=True,
            return_dict_in_generate=True,
        )
        tokens = output.sequences[:, width:]
        log_probs = torch.stack(
            [
                (logits.float() / settings.temperature).log_softmax(-1).gather(1, tokens[:, index, None])[:, 0]
                for index, logits in enumerate(output.logits)
            ],
            1,
        )
        return [
            _result(row, values, stops, settings)
            for row, values in zip(tokens.tolist(), log_probs.tolist(), strict=True)
        ]


def _result(
    tokens: list[int], log_probs: list[float], stops: list[int], settings: GenerationSettings
) -> GenerationResult:
    """Checks and returns the response in one row of the output, which is padded after its stop token."""
    end = next((index for index, token in enumerate(tokens) if token in stops), None)
    length = len(tokens) if end is None else end + 1
    result = GenerationResult(tokens=tokens[:length], log_probs=log_probs[:length])
    return check_result(result, settings, ended=end is not None)


def hf_engine(settings: EngineArgs, device: torch.device) -> HFEngine:
    """Makes the engine that runs transformers in this process, on `device`."""
    return HFEngine(device)
