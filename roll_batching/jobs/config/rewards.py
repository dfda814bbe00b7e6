"""Registered reward functions, the keys of rewards, and the rules for these keys."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from roll_batching.jobs.config.diagnostics import Problem
from roll_batching.registry import Entry, Registry
from roll_batching.settings.fields import MOST_PROCESSES, ROLLOUTS, RegisteredName, Settings, Switch, setting

REWARDS: Registry[Entry] = Registry(
    "reward function",
    Entry(
        name="final_answer",
        target="roll_batching.jobs.rewards:final_answer",
        summary="1 when what follows the last `#` is the answer, and the response ended there; marks `shows_work`",
    ),
    Entry(
        name="exact_match",
        target="roll_batching.jobs.rewards:exact_match",
        summary="1 when the response, or what follows the last `after` in it, is the answer; reward_args `after`, "
        "`ignore_case`",
    ),
    Entry(
        name="math_verify",
        target="roll_batching.jobs.rewards.mathematics:math_verify",
        summary="1 when the response's answer equals the right one as mathematics (the library math-verify, extra "
        "`math`); reward_args `after`, such as `</think>`",
    ),
    Entry(
        name="code_tests",
        target="roll_batching.jobs.rewards.code:code_tests",
        summary="the share of its tests that the response's code passes. Runs what the model wrote: off until "
        "reward_args `run` says how (docs/rewards.md)",
    ),
    Entry(
        name="multiple_choice",
        target="roll_batching.jobs.rewards.choices:multiple_choice",
        summary="by the letter in the last box of the response; reward_args `grading` (boxed, loose, soft, strict), "
        "`repetition_penalty`",
    ),
    Entry(
        name="llm_judge",
        target="roll_batching.jobs.rewards.judge:llm_judge",
        summary="by the verdict of a judge model behind an OpenAI-like URL; reward_args `url`, `model` and others "
        "(docs/rewards.md)",
    ),
    Entry(
        name="ifeval",
        target="roll_batching.jobs.rewards.instructions:ifeval",
        summary="1 when the response keeps the constraint in the answer of its prompt (IFEval); reward_args "
        "`repetition_penalty`",
    ),
    Entry(
        name="verl_compute_score",
        target="roll_batching.jobs.rewards.host_contracts:verl_compute_score",
        summary="a `compute_score` of verl's contract; reward_args `path`, `name`, `reward_kwargs`",
    ),
    Entry(
        name="slime_custom_rm",
        target="roll_batching.jobs.rewards.host_contracts:slime_custom_rm",
        summary="a function of slime's `--custom-rm-path`; reward_args `path`, `reward_key`, `metadata_key`, `options`",
    ),
    Entry(
        name="response_and_answer",
        target="roll_batching.jobs.rewards.host_contracts:response_and_answer",
        summary="a plain function of the response and the right answer, as ROLL's reward workers call; reward_args "
        "`path`, `name`, `arguments`, `item`",
    ),
)


def name_of(path: str) -> str:
    """The registered name of the function at the dotted `path`, or `path` if it is not registered."""
    return next((entry.name for entry in REWARDS if entry.target == path), path)


_SHARES_SUM_TO = 1e-3
"""Largest difference of the sum of `domain_interleave_probs` from 1."""


class RewardConfig(Settings):
    """`rewards.NAME`: the reward of one domain of prompts."""

    reward_function: Annotated[str, RegisteredName(REWARDS)] = setting(
        help="The function that scores the responses to the domain's prompts."
    )
    reward_args: dict[str, Any] = setting(default_factory=dict, help="Its keyword arguments.")
    tag_included: list[str] | None = setting(
        None,
        help="Tags of the domain's prompts (actor_train.data_args.tag names their key). A prompt whose key `domain` "
        "names one of `rewards` belongs to it, whatever its tag. Default: all tags that no other domain names.",
    )


_SCORED = Switch(lambda job: job.has_reward, "no reward_function scores responses")
_READ_IF = {
    "*": (ROLLOUTS, _SCORED),
    "reward_args": (ROLLOUTS, _SCORED, Switch(lambda job: not job.rewards, "each of `rewards` has its own")),
}


class RewardKeys(Settings, read_if=_READ_IF):
    """The keys of rewards."""

    reward_function: Annotated[str | None, RegisteredName(REWARDS)] = setting(
        None,
        help="The function that scores responses; your own takes a roll_batching.jobs.rewards.Completion. It, or "
        "`rewards`, is needed when max_steps > 0, unless a rollout_function returns rewards.",
    )
    reward_args: dict[str, Any] = setting(default_factory=dict, help="Keyword arguments for the reward function.")
    rewards: dict[str, RewardConfig] = setting(
        default_factory=dict,
        help="Instead of reward_function: rewards of several domains, by name; each is a metric, `reward/NAME`.",
    )
    reward_workers: int = setting(
        1,
        help="Processes per reward function and data-parallel rank, which score in parallel.",
        ge=1,
        le=MOST_PROCESSES,
    )
    reward_timeout: float = setting(
        300.0,
        help="Most seconds of one call of a reward function, and of the import of its module (at least 60).",
        gt=0,
    )
    reward_memory: int | None = setting(
        None,
        help="Most MiB of one call beyond the memory of its process after the import. Default: no limit.",
        ge=1,
    )
    reward_failure: Literal["error", "zero", "drop"] = setting(
        "error",
        help="If the reward of a response raises, takes too long, ends its process or is not a number: the job ends "
        "with an error that names the response (error); its reward is 0 (zero); or it is left out of training, and the "
        "mean reward of the others replaces its own in its group's advantages (drop). `reward_failures` counts them; a "
        "step without any reward is an error.",
    )

    @property
    def has_reward(self) -> bool:
        """Whether a reward function scores responses; else a rollout function returns their rewards."""
        return bool(self.rewards) or self.reward_function is not None


def prompts_of_domains(shares: Mapping[str, float], prompts: int) -> dict[str, int]:
    """Number of prompts of each domain in a step: rounded down, the last domain has the rest.

    Source: ROLL, `roll/pipeline/rlvr/rlvr_pipeline.py`, `domain_batch_size`.
    """
    *names, last = shares
    counts = {name: math.floor(shares[name] * prompts) for name in names}
    return counts | {last: prompts - sum(counts.values())}


def share_problems(
    shares: Mapping[str, float] | None, rewards: Mapping[str, RewardConfig], prompts: int
) -> Iterator[Problem]:
    """Problems of `domain_interleave_probs`."""
    if shares is None:
        return
    path = ("actor_train", "data_args", "domain_interleave_probs")
    if unknown := sorted(shares.keys() - rewards.keys()):
        yield Problem((*path, unknown[0]), f"names no domain of `rewards` ({', '.join(rewards) or 'there are none'})")
    elif missing := sorted(rewards.keys() - shares.keys()):
        text = f"lacks {', '.join(missing)}: prompts of that domain would never be drawn; give it a part, or remove"
        yield Problem(path, f"{text} rewards.{missing[0]} and its prompts")
    elif not all(share > 0 for share in shares.values()) or abs(sum(shares.values()) - 1) > _SHARES_SUM_TO:
        yield Problem(path, f"has the parts {', '.join(map(str, shares.values()))}; all are above 0 and sum to 1")
    elif none := [name for name, count in prompts_of_domains(shares, prompts).items() if count < 1]:
        text = f"leaves {', '.join(none)} no prompt of the {prompts} of a step (rollout_batch_size)"
        yield Problem(path, f"{text}; raise one of the two")


def reward_problems(rewards: Mapping[str, RewardConfig], reward_function: str | None) -> Iterator[Problem]:
    """Problems of rewards that exclude each other."""
    if rewards and reward_function is not None:
        yield Problem(
            ("reward_function",), "is given beside `rewards`, each with its own function; keep one of the two"
        )
    owners: dict[str | None, str] = {}
    for name, reward in rewards.items():
        for tag in reward.tag_included if reward.tag_included is not None else [None]:
            owner = owners.setdefault(tag, name)
            if owner != name and tag is None:
                text = f"is missing, as in rewards.{owner}: only one domain can take all remaining tags"
                yield Problem(("rewards", name, "tag_included"), text)
            elif owner != name:
                yield Problem(("rewards", name, "tag_included"), f"has {tag!r}, which rewards.{owner} already has")
