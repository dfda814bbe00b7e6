"""Rules of `adv_estimator: gigpo`, which compares turns in equal states."""

from __future__ import annotations

from collections.abc import Iterator

from roll_batching.jobs.config.advantages import compares_states
from roll_batching.jobs.config.diagnostics import Problem
from roll_batching.jobs.config.job_keys import JobKeys
from roll_batching.jobs.config.supervised import supervised


def gigpo_problems(job: JobKeys) -> Iterator[Problem]:
    """What GiGPO lacks, and keys that it excludes."""
    if not compares_states(job.adv_estimator) or supervised(job) or job.task == "distill" or not job.max_steps:
        return
    if job.rollout_function is None:
        text = "gigpo compares the turns of samples that reach equal states; set rollout_function to a function that "
        text += "returns states and a reward for each turn (docs/rollouts.md), or choose grpo"
        yield Problem(("adv_estimator",), text)
    elif job.has_reward:
        key = "reward_function" if job.reward_function is not None else "rewards"
        yield Problem((key,), "scores whole samples, and gigpo reads a reward for each turn, which rollout_function "
                      "returns; leave it out")  # fmt: skip
    if job.norm_std_type in ("batch", "running"):
        text = f"is {job.norm_std_type}; gigpo compares groups of states: group divides by their deviation, ~ does not"
        yield Problem(("norm_std_type",), text)
    if job.advantages_of_tokens:
        key = "add_token_level_kl" if job.add_token_level_kl else "gamma"
        text = "makes advantages of tokens, and gigpo has those of turns (step_reward_gamma); leave it out"
        yield Problem((key,), text)
    if job.shapes_rewards:
        key = "reward_scaling" if job.reward_scaling is not None else "overlong_buffer"
        yield Problem((key,), "changes rewards of whole samples, and gigpo reads those of turns; leave it out")
    if not job.episode_reward_weight and not job.step_reward_weight:
        yield Problem(("step_reward_weight",), "is 0 beside episode_reward_weight: 0, which leaves no advantage")
