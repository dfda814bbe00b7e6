"""Transformers in this process: slow, and the same code as everybody's, which makes it the engine to compare with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from roll_batching.errors import EngineError
from roll_batching.jobs.engines.protocol import Answer, Question, checked
from roll_batching.strategy.sampling import GenerationSettings

_AT_ONCE = 32
"""Questions that are answered together."""
_LONGEST = 24 * 3600.0
"""Seconds: it computes as long as it takes, and nothing but this process's end ends it."""


class HFEngine:
    """`generate` of transformers, on `device`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.version = 0
        self._model: Any = None

    @property
    def live(self) -> Mapping[str, None]:
        """One model, once it has weights."""
        return {} if self._model is None else {"transformers": None}

    def use(self, live: Mapping[str, Any], version: int) -> None:
        """Every process has a model of its own, and reads its weights itself."""

    def figures(self) -> dict[str, float]:
        """Nothing happens that would be counted."""
        return {}

    def seconds_to_answer(self, questions: int) -> float:
        """Nobody knows."""
        return _LONGEST

    def seconds_to_update(self) -> float:
        """Nobody knows."""
        return _LONGEST

    def sleep(self) -> None:
        """Forgets the model."""
        self._model = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def update_weights(self, folder: Path, version: int, *, asleep: bool = False) -> None:
        """Reads the model directory `folder`. Raises EngineError."""
        from transformers import AutoModelForCausalLM, GenerationConfig

        self._model = None
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(str(folder), dtype="auto")
        except Exception as error:
            raise EngineError(f"transformers cannot read {folder}: {type(error).__name__}: {error}") from error
        # Else what the settings have no word for (repetition_penalty, min_p, ...) would be the directory's.
        model.generation_config = GenerationConfig()
        self._model, self.version = model.to(self.device).eval(), version

    @torch.no_grad()
    def generate(self, questions: Sequence[Question], settings: GenerationSettings) -> list[Answer]:
        """The answers, in the order of `questions`; questions that are answered together share the first one's seed."""
        if questions and self._model is None:
            raise EngineError("transformers has no weights yet: update_weights comes first")
        parts = [questions[start : start + _AT_ONCE] for start in range(0, len(questions), _AT_ONCE)]
        devices = [self.device] if self.device.type == "cuda" else []
        answers = []
        for part in parts:
            with torch.random.fork_rng(devices=devices):
                torch.manual_seed(part[0].seed)
                answers += self._some(part, settings)
        return answers

    def _some(self, questions: Sequence[Question], settings: GenerationSettings) -> list[Answer]:
        from transformers import GenerationConfig

        stops = sorted({settings.eos_token_id, *settings.stop_token_ids})
        width = max(len(question.tokens) for question in questions)
        pads = [width - len(question.tokens) for question in questions]
        rows = [[stops[0]] * pad + question.tokens for pad, question in zip(pads, questions, strict=True)]
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
        made = self._model.generate(
            input_ids=torch.tensor(rows, device=self.device),
            attention_mask=torch.tensor(mask, device=self.device),
            generation_config=config,
            output_logits=True,
            return_dict_in_generate=True,
        )
        tokens = made.sequences[:, width:]
        log_probs = torch.stack(
            [
                (logits.float() / settings.temperature).log_softmax(-1).gather(1, tokens[:, place, None])[:, 0]
                for place, logits in enumerate(made.logits)
            ],
            1,
        )
        return [
            _answer(row, values, stops, settings)
            for row, values in zip(tokens.tolist(), log_probs.tolist(), strict=True)
        ]


def _answer(tokens: list[int], log_probs: list[float], stops: list[int], settings: GenerationSettings) -> Answer:
    """The response in a row, whose end is filled."""
    end = next((place for place, token in enumerate(tokens) if token in stops), None)
    length = len(tokens) if end is None else end + 1
    return checked(Answer(tokens=tokens[:length], log_probs=log_probs[:length]), settings, ended=end is not None)
