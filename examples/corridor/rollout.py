"""Rollout function with an environment: a corridor of five places, in which the model walks to a goal.

    1>3=r2l1r2r3

The prompt `1>3=` names the start and the goal. The model writes one step at a time, `l` or `r`; the environment answers
with the place that it leads to, which is not trained on. Other tokens stay at the place. The sample ends at the goal,
with a reward of 1 for its last turn, or after `max_turns` turns.
"""

from __future__ import annotations

from roll_batching.jobs.rollouts import RolloutClient, RolloutPrompt, RolloutSample
from roll_batching.jobs.texts import Tokenizer

LAST = 4
"""Number of the corridor's last place."""


async def rollout(
    prompt: RolloutPrompt, client: RolloutClient, tokenizer: Tokenizer, max_turns: int = 6
) -> RolloutSample:
    """One walk. States are the places before each turn, so that walks to one goal meet in them."""
    place, goal = int(prompt.record["start"]), int(prompt.record["goal"])
    tokens: list[int] = []
    loss_mask: list[int] = []
    log_probs: list[float] = []
    states: list[int] = []
    rewards: list[float] = []
    while place != goal and len(states) < max_turns:
        turn = await client.generate(prompt.tokens + tokens, max_new_tokens=1)
        states.append(place)
        place = min(max(place + {"l": -1, "r": 1}.get(turn.text, 0), 0), LAST)
        reply = tokenizer.encode(str(place))
        tokens += [*turn.tokens, *reply]
        loss_mask += [1, *[0] * len(reply)]
        log_probs += [*turn.log_probs, *[0.0] * len(reply)]
        rewards.append(float(place == goal))
    return RolloutSample(
        tokens=tokens,
        loss_mask=loss_mask,
        log_probs=log_probs,
        reward=rewards,
        states=states,
        finished=place == goal,
        marks={"arrived": place == goal},
    )
