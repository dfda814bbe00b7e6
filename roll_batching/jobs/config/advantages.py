"""Registered advantage estimators and the keys of their settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from roll_batching.registry import Entry, Registry


@dataclass(frozen=True, kw_only=True)
class AdvantageEstimator(Entry):
    """A registered advantage estimator."""

    keys: Mapping[str, str]
    """The job's keys that set it, each with the keyword of the function `target` that takes the value."""
    compares: bool = False
    """Whether it compares the responses to a prompt, and so needs at least two."""
    of_turns: bool = False
    """Whether it gives advantages of turns, from the states and rewards that a rollout function returns."""
    greedy: bool = False
    """Whether it needs the reward of a greedy completion of each prompt, which is sampled for it (`baselines`)."""
    implied: Mapping[str, str | bool] = field(default_factory=dict)
    """Keys that have one fixed value under this estimator; a file may give that value, and no other."""


_CLIPS = {"reward_clip": "reward_clip", "advantage_clip": "advantage_clip"}
_LIMITS = {**_CLIPS, "whiten_advantages": "whiten"}

GAE, GIGPO = "gae", "gigpo"
"""Names of the estimator that needs a critic, and of the one that needs states of turns."""

ADVANTAGE_ESTIMATORS: Registry[AdvantageEstimator] = Registry(
    "advantage estimator",
    AdvantageEstimator(
        name="grpo",
        target="roll_batching.jobs.objectives.advantages:grpo",
        summary="rewards minus their group's mean, over its deviation (the sample's, plus 1e-6)",
        keys={"norm_std_type": "std", **_LIMITS},
        compares=True,
        implied={"norm_mean_type": "group"},
    ),
    AdvantageEstimator(
        name="reinforce",
        target="roll_batching.jobs.objectives.advantages:reinforce",
        summary="rewards as norm_* says",
        keys={"norm_mean_type": "mean", "norm_std_type": "std", **_LIMITS},
    ),
    AdvantageEstimator(
        name="step_reinforce",
        target="roll_batching.jobs.objectives.advantages:reinforce",
        summary="ROLL's: reinforce over steps; a response is one step here, so that both are the same",
        keys={"norm_mean_type": "mean", "norm_std_type": "std", **_LIMITS},
    ),
    AdvantageEstimator(
        name="reinforce_plus_plus",
        target="roll_batching.jobs.objectives.advantages:reinforce_plus_plus",
        summary="rewards, whitened over the step's tokens (REINFORCE++)",
        keys=_CLIPS,
        implied={"whiten_advantages": True},
    ),
    AdvantageEstimator(
        name="reinforce_plus_plus_baseline",
        target="roll_batching.jobs.objectives.advantages:reinforce_plus_plus_baseline",
        summary="rewards minus their group's mean, whitened over the step's tokens (REINFORCE++ with baseline)",
        keys=_CLIPS,
        compares=True,
        implied={"norm_mean_type": "group", "whiten_advantages": True},
    ),
    AdvantageEstimator(
        name="rloo",
        target="roll_batching.jobs.objectives.advantages:rloo",
        summary="rewards minus the mean of their group's others (RLOO)",
        keys=_LIMITS,
        compares=True,
    ),
    AdvantageEstimator(
        name="grpo_leave_one_out",
        target="roll_batching.jobs.objectives.advantages:grpo_leave_one_out",
        summary="rewards minus the mean of their group's others, over their deviation unless that is 0 (NeMo-RL)",
        keys=_LIMITS,
        compares=True,
    ),
    AdvantageEstimator(
        name="opo",
        target="roll_batching.jobs.objectives.advantages:opo",
        summary="rewards minus their group's mean over tokens (OPO)",
        keys=_LIMITS,
        compares=True,
    ),
    AdvantageEstimator(
        name="gpg",
        target="roll_batching.jobs.objectives.advantages:gpg",
        summary="rewards minus their group's mean, times the step's responses over those with a reward (GPG)",
        keys=_LIMITS,
        compares=True,
    ),
    AdvantageEstimator(
        name="pass_at_k",
        target="roll_batching.jobs.objectives.advantages:pass_at_k",
        summary="the best response's lead over the second, over the group's deviation; 0 for the others (pass@k)",
        keys=_LIMITS,
        compares=True,
    ),
    AdvantageEstimator(
        name="remax",
        target="roll_batching.jobs.objectives.advantages:remax",
        summary="rewards minus that of the greedy answer, which is one more response per prompt (ReMax)",
        keys=_LIMITS,
        greedy=True,
    ),
    AdvantageEstimator(
        name=GIGPO,
        target="roll_batching.jobs.objectives.gigpo:GiGPO",
        summary="of turns: rewards of episodes minus their group's mean, and those of turns in equal states (GiGPO)",
        keys={
            "norm_std_type": "std",
            "advantage_clip": "advantage_clip",
            "episode_reward_weight": "episode_weight",
            "step_reward_weight": "step_weight",
            "step_reward_gamma": "gamma",
        },
        compares=True,
        of_turns=True,
        implied={"norm_mean_type": "group"},
    ),
    AdvantageEstimator(
        name=GAE,
        target="roll_batching.jobs.objectives.advantages:reinforce",
        summary="rewards as norm_* says, minus the values of a critic (generalised advantage estimation, PPO)",
        keys={"norm_mean_type": "mean", "norm_std_type": "std", **_LIMITS},
    ),
)
ADVANTAGE_KEYS = tuple(dict.fromkeys(key for entry in ADVANTAGE_ESTIMATORS for key in entry.keys))
"""Keys that registered estimators read. A user's estimator reads none of them."""


def compares_states(name: str) -> bool:
    """Whether the estimator `name` compares turns in equal states."""
    entry = ADVANTAGE_ESTIMATORS.get(name)
    return entry is not None and entry.of_turns


REFUSED_ESTIMATORS: Mapping[str, str] = {
    "agentic_reinforce": "it discounts over turns (rollout_function): choose reinforce, the same with gamma: 1",
    "optimal_token_baseline": "it needs the norms of each token's logits; choose opo, whose baseline weighs by length",
}
"""Estimators of other frameworks that are not supported: the reason, and which to choose instead."""
