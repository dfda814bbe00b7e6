"""Held-out evaluation: samples and scores responses to prompts that training never sees."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from roll_batching.jobs.rewards.pool import RewardPool
from roll_batching.jobs.rollouts.contract import Sampler
from roll_batching.jobs.rollouts.function_rollouts import FunctionRollouts
from roll_batching.jobs.rollouts.rollout import StepScores, generate_rollouts, score_rollouts
from roll_batching.jobs.rollouts.step_metrics import mean_reward_by_domain
from roll_batching.jobs.seeds import evaluation_seed
from roll_batching.jobs.texts.texts import Prompt, PromptDataset
from roll_batching.jobs.texts.tokenizers import Tokenizer
from roll_batching.strategy import GenerationSettings


@dataclass(frozen=True, kw_only=True)
class Evaluator:
    """Evaluates a policy on the first `samples` held-out prompts, which repeat if there are fewer.

    Responses are sampled with `settings`, from another seed at every evaluation.
    """

    prompts: PromptDataset
    tokenizer: Tokenizer
    reward: RewardPool
    settings: GenerationSettings
    samples: int
    prompt_length: int
    seed: int
    shown: int = 0
    """Responses in the sample log; -1: all."""
    function: FunctionRollouts | None = None
    """The user's rollout function, which makes the responses. None: the model answers each prompt once."""

    def __call__(self, sampler: Sampler, *, number: int) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Runs one evaluation; returns metrics (`evaluation_metrics`) and lines of rollouts.jsonl. Collective.

        `number` selects the seed. The results are the same on all ranks.
        """
        prompts, seed = self.request(number)
        settings = replace(self.settings, seed=seed)
        rollouts = generate_rollouts(
            sampler, prompts, self.tokenizer, settings, prompt_length=self.prompt_length, function=self.function
        )
        scores = score_rollouts(sampler, rollouts, self.reward, shown=self.shown)
        return evaluation_metrics(scores), scores.sample_log

    def request(self, number: int) -> tuple[list[Prompt], int]:
        """Prompts and seed of evaluation `number`."""
        return [self.prompts[i % len(self.prompts)] for i in range(self.samples)], evaluation_seed(self.seed, number)


def evaluation_metrics(scores: StepScores) -> dict[str, float]:
    """Metrics of the scored responses to held-out prompts.

    `eval_reward`, `eval_samples`, `eval_response_length_mean`; for every domain `eval_reward/<domain>`; for every mark
    `eval_mark/<mark>` (its share), `eval_reward_with/<mark>` and `eval_reward_without/<mark>` (mean reward of responses
    with and without the mark; left out where there are none).
    """
    metrics = {
        "eval_reward": float(scores.rewards.mean()),
        "eval_samples": len(scores.rewards),
        "eval_response_length_mean": float(scores.response_tokens.mean()),
    }
    metrics |= {f"eval_reward/{name}": mean for name, mean in mean_reward_by_domain(scores).items()}
    for name, mark in scores.marks.items():
        metrics[f"eval_mark/{name}"] = float(mark.mean())
        for kind, selected in (("with", mark), ("without", ~mark)):
            if selected.any():
                metrics[f"eval_reward_{kind}/{name}"] = float(scores.rewards[selected].mean())
    return metrics
