"""Held-out evaluation: sampled answers to prompts that training never sees."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from roll_batching.jobs.rewards.pool import RewardPool
from roll_batching.jobs.rollouts.rollout import Source, generate_rollouts, score_rollouts
from roll_batching.jobs.rollouts.rows import means_of_domains
from roll_batching.jobs.seeds import evaluation_seed
from roll_batching.jobs.texts.texts import PromptDataset
from roll_batching.jobs.texts.tokenizers import Tokenizer
from roll_batching.strategy import GenerationSettings


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What an evaluation found."""

    figures: dict[str, float]
    said: list[dict[str, Any]]
    """Lines of rollouts.jsonl, of some of the answers."""


@dataclass(frozen=True, kw_only=True)
class Evaluator:
    """Evaluates a policy on the first `samples` held-out prompts (all of them again where there are fewer).

    Answers are sampled as `settings` say, with fresh draws at every evaluation.
    """

    prompts: PromptDataset
    tokenizer: Tokenizer
    reward: RewardPool
    settings: GenerationSettings
    samples: int
    prompt_length: int
    seed: int
    shown: int = 0
    """Answers whose texts are told; -1: all."""

    def __call__(self, source: Source, *, number: int) -> Evaluation:
        """One evaluation of what `source` answers, `number` telling it from the others.

        Collective; the same on all ranks.

        Its figures are `eval_reward`, `eval_samples`, `eval_response_length_mean`, and for every mark `eval_mark/x`
        (its share), `eval_reward_with/x` and `eval_reward_without/x` (mean reward where it is set and where not; left
        out where no answer is of that kind).
        """
        prompts = [self.prompts[i % len(self.prompts)] for i in range(self.samples)]
        settings = replace(self.settings, seed=evaluation_seed(self.seed, number))
        rollouts = generate_rollouts(source, prompts, self.tokenizer, settings, prompt_length=self.prompt_length)
        scores = score_rollouts(source, rollouts, self.reward, shown=self.shown)
        figures = {
            "eval_reward": float(scores.rewards.mean()),
            "eval_samples": len(scores.rewards),
            "eval_response_length_mean": float(scores.response_tokens.mean()),
        }
        figures |= {f"eval_reward/{name}": mean for name, mean in means_of_domains(scores).items()}
        for name, mark in scores.marks.items():
            figures[f"eval_mark/{name}"] = float(mark.mean())
            figures |= _mean_where(f"eval_reward_with/{name}", scores.rewards, mark)
            figures |= _mean_where(f"eval_reward_without/{name}", scores.rewards, ~mark)
        return Evaluation(figures=figures, said=scores.said)


def _mean_where(key: str, values: np.ndarray, chosen: np.ndarray) -> dict[str, float]:
    return {key: float(values[chosen].mean())} if chosen.any() else {}
