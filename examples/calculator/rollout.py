"""Rollout function with a calculator, which the model may call several times in one sample.

    5+8+4=?5+8;13;?13+4;17;#17$

After the prompt `5+8+4=` the model writes a call, `?5+8;`. The calculator's reply, `13;`, becomes part of the sample
without being trained on. The model calls again, and ends with its answer, `#17$`.
"""

from __future__ import annotations

import asyncio
import re

from roll_batching.jobs.rollouts import RolloutClient, RolloutPrompt, RolloutSample
from roll_batching.jobs.texts import Tokenizer

CALL = re.compile(r"\?(\d+)\+(\d+);")


async def calculator(left: int, right: int) -> str:
    """The reply of the tool; a real one would be a request to a server."""
    await asyncio.sleep(0)
    return f"{left + right};"


async def rollout(
    prompt: RolloutPrompt,
    client: RolloutClient,
    tokenizer: Tokenizer,
    max_tool_calls: int = 2,
    tool_reward: float = 0.1,
) -> RolloutSample:
    """One sample: turns of the model, and between them the calculator's replies."""
    end_of_call = tokenizer.encode(";")
    tokens: list[int] = []
    loss_mask: list[int] = []
    log_probs: list[float] = []
    rewards: list[float] = []
    while True:
        turn = await client.generate(prompt.tokens + tokens, stop_token_ids=end_of_call)
        tokens += turn.tokens
        loss_mask += [1] * len(turn.tokens)
        log_probs += turn.log_probs
        call = CALL.fullmatch(turn.text)
        if call is None or len(rewards) == max_tool_calls:
            break
        reply = tokenizer.encode(await calculator(int(call[1]), int(call[2])))
        if client.room(prompt.tokens + tokens) <= len(reply):
            break
        rewards.append(tool_reward)
        tokens += reply
        loss_mask += [0] * len(reply)  # not trained on
        log_probs += [0.0] * len(reply)
    is_right = turn.finished and turn.text == f"#{prompt.record['answer']}"
    return RolloutSample(
        tokens=tokens,
        loss_mask=loss_mask,
        log_probs=log_probs,
        reward=[*rewards, float(is_right)],
        marks={"right": is_right, "two_calls": len(rewards) == 2},
    )
