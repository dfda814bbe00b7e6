"""Rollout functions that tests name by path: right ones, and one for each fault."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from dataclasses import replace
from typing import Any

import numpy as np

from roll_batching.jobs.rollouts import RolloutSample

STEP = 3
"""Tokens of a turn of `three_turns`."""


async def three_turns(prompt: Any, client: Any, tokenizer: Any, reward: bool = True, pause: float = 0.0) -> Any:
    """Turns of at most three tokens, with a reply `+N` between them; even samples have two turns, odd ones three."""
    tokens: list[int] = []
    mask: list[int] = []
    log_probs: list[float] = []
    turns = 2 + prompt.sample % 2
    for turn in range(turns):
        if turn:
            await asyncio.sleep(pause * random.random())  # samples arrive in any order
            reply = tokenizer.encode(f"+{turn}")
            tokens, mask, log_probs = tokens + reply, mask + [0] * len(reply), log_probs + [0.0] * len(reply)
        made = await client.generate(prompt.tokens + tokens, max_new_tokens=STEP)
        tokens, mask = tokens + made.tokens, mask + [1] * len(made.tokens)
        log_probs = log_probs + made.log_probs
    rewards = [float(prompt.record["level"]), prompt.sample / 100] if reward else None
    marks = {"odd": bool(prompt.sample % 2)} if reward else {}
    return RolloutSample(tokens=tokens, loss_mask=mask, log_probs=log_probs, reward=rewards, marks=marks)


async def turns_as_samples(prompt: Any, client: Any, tokenizer: Any, reward: bool = True, pause: float = 0.0) -> Any:
    """`three_turns` with each turn as a sample, whose prompt is all that was before it; the last has the reward."""
    whole = await three_turns(prompt, client, tokenizer, reward, pause)
    mask = [*whole.loss_mask, 0]
    starts = [place for place in range(len(mask)) if mask[place] and not (place and mask[place - 1])]
    ends = [place + 1 for place in range(len(mask) - 1) if mask[place] and not mask[place + 1]]
    return [
        RolloutSample(
            tokens=whole.tokens[start:end],
            loss_mask=[1] * (end - start),
            log_probs=whole.log_probs[start:end],
            prompt_tokens=[*prompt.tokens, *whole.tokens[:start]],
            reward=whole.reward if end == ends[-1] else None,
            marks=whole.marks if end == ends[-1] else {},
            finished=whole.finished,
        )
        for start, end in zip(starts, ends, strict=True)
    ]


async def slow_tool(prompt: Any, client: Any, tokenizer: Any, seconds: float) -> Any:
    """Three turns of one token, before one of which a tool takes its time: each of three rollouts waits elsewhere."""
    tokens: list[int] = []
    log_probs: list[float] = []
    for turn in range(3):
        await asyncio.sleep(seconds if turn == prompt.sample % 3 else 0)
        made = await client.generate(prompt.tokens + tokens, max_new_tokens=1)
        tokens, log_probs = tokens + made.tokens, log_probs + made.log_probs
    return RolloutSample(tokens=tokens, loss_mask=[1] * len(tokens), log_probs=log_probs, reward=prompt.sample / 10)


async def races(prompt: Any, client: Any, tokenizer: Any) -> Any:
    """Takes the first of two answers, and returns while the other is on its way."""
    both = [asyncio.ensure_future(client.generate(prompt.tokens, max_new_tokens=count)) for count in (1, 12)]
    (first, *_), _ = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    made = first.result()
    return RolloutSample(tokens=made.tokens, loss_mask=[1] * len(made.tokens), log_probs=made.log_probs, reward=1.0)


async def swallows(prompt: Any, client: Any, tokenizer: Any) -> Any:
    """Goes on whatever its client raises."""
    while True:
        try:
            await client.generate(prompt.tokens)
        except Exception:
            await asyncio.sleep(0.01)


async def one_turn(prompt: Any, client: Any, tokenizer: Any) -> Any:
    """What the job does without a rollout function."""
    made = await client.generate(prompt.tokens)
    return RolloutSample(tokens=made.tokens, loss_mask=[1] * len(made.tokens), log_probs=made.log_probs)


async def searches(prompt: Any, client: Any, tokenizer: Any) -> Any:
    """Two branches at once with other limits, of which the likelier one is kept, and one that is given up."""
    with_stop, long = await asyncio.gather(
        client.generate(prompt.tokens, stop_token_ids=tokenizer.encode("abcdefghijklm")),
        client.generate(prompt.tokens, max_new_tokens=5),
    )
    try:
        await asyncio.wait_for(client.generate(prompt.tokens), 1e-4)
    except TimeoutError:
        pass
    letters = set(tokenizer.encode("abcdefghijklm"))
    assert not letters & set(with_stop.tokens[:-1]) and len(long.tokens) <= 5
    kept = max(with_stop, long, key=lambda made: sum(made.log_probs) / len(made.log_probs))
    return RolloutSample(
        tokens=kept.tokens, loss_mask=[1] * len(kept.tokens), log_probs=kept.log_probs, reward=1.0, finished=True
    )


async def two_states(prompt: Any, client: Any, tokenizer: Any, states: Any, reward: Any) -> Any:
    """Two turns of three tokens with a reply between them, and these states and rewards."""
    first = await client.generate(prompt.tokens, max_new_tokens=STEP)
    reply = tokenizer.encode("+1")
    last = await client.generate([*prompt.tokens, *first.tokens, *reply], max_new_tokens=STEP)
    return RolloutSample(
        tokens=[*first.tokens, *reply, *last.tokens],
        loss_mask=[1] * len(first.tokens) + [0] * len(reply) + [1] * len(last.tokens),
        log_probs=[*first.log_probs, *[None] * len(reply), *last.log_probs],
        reward=reward,
        states=states,
    )


# ---- faults; sample 2 has them, others are right


async def _right(prompt: Any, client: Any) -> RolloutSample:
    made = await client.generate(prompt.tokens, max_new_tokens=4)
    return RolloutSample(tokens=made.tokens, loss_mask=[1] * len(made.tokens), log_probs=made.log_probs, reward=0.5)


async def faulty(prompt: Any, client: Any, tokenizer: Any, fault: str) -> Any:
    """`fault` in sample 2."""
    right = await _right(prompt, client)
    if prompt.sample != 2:
        return right
    return FAULTS[fault](right, prompt)


def _with(**changes: Any) -> Any:
    return lambda right, prompt: replace(right, **changes)


def _last_log_prob(value: Any) -> Any:
    return lambda right, prompt: replace(right, log_probs=[*right.log_probs[:-1], value])


FAULTS = {
    "nothing": lambda right, prompt: None,
    "no samples": lambda right, prompt: [],
    "a list": lambda right, prompt: [right, {"tokens": right.tokens}],
    "one sample twice": lambda right, prompt: [right, right],
    "a fault in the second sample": lambda right, prompt: [right, replace(right, loss_mask=[0] * len(right.tokens))],
    "no reward in any sample": lambda right, prompt: [replace(right, reward=None), replace(right, reward=None)],
    "marks without a reward": lambda right, prompt: [right, replace(right, reward=None, marks={"x": True})],
    "a dict": lambda right, prompt: {"tokens": right.tokens},
    "text": _with(tokens="abc"),
    "no tokens": _with(tokens=[], loss_mask=[], log_probs=[]),
    "float tokens": lambda right, prompt: replace(right, tokens=[float(token) for token in right.tokens]),
    "a token too large": lambda right, prompt: replace(right, tokens=[*right.tokens[:-1], 43]),
    "a negative token": lambda right, prompt: replace(right, tokens=[-1, *right.tokens[1:]]),
    "a huge token": lambda right, prompt: replace(right, tokens=[1 << 70, *right.tokens[1:]]),
    "a token of 5,000 digits": lambda right, prompt: replace(right, tokens=[10**5000, *right.tokens[1:]]),
    "a square": lambda right, prompt: replace(right, tokens=np.zeros((2, 2), dtype=int)),
    "short mask": lambda right, prompt: replace(right, loss_mask=[1]),
    "long mask": lambda right, prompt: replace(right, loss_mask=[1] * 99),
    "no mask": lambda right, prompt: replace(right, loss_mask=[0] * len(right.tokens)),
    "weights": lambda right, prompt: replace(right, loss_mask=[0.5] * len(right.tokens)),
    "no log-probs": _with(log_probs=None),
    "short log-probs": _with(log_probs=[-1.0]),
    "a missing log-prob": _last_log_prob(None),
    "nan": _last_log_prob(float("nan")),
    "infinite": _last_log_prob(float("-inf")),
    "a probability": _last_log_prob(0.7),
    "a text for a log-prob": _last_log_prob("-1"),
    "a log-prob of 5,000 digits": _last_log_prob(-(10**5000)),
    "a log-prob below fp32": _last_log_prob(-1e39),
    "a complex log-prob": _last_log_prob(np.complex64(-1)),
    "no reward": _with(reward=None),
    "a reward of 5,000 digits": _with(reward=[1.0, 10**5000]),
    "reward nan": _with(reward=float("nan")),
    "reward text": _with(reward="good"),
    "no turn rewards": _with(reward=[]),
    "turn reward infinite": _with(reward=[1.0, float("inf")]),
    "marks": _with(marks={"x": 3}),
    "finished": _with(finished="yes"),
    "too long": lambda right, prompt: replace(right, tokens=[1] * 999, loss_mask=[1] * 999, log_probs=[-1.0] * 999),
    "the prompt twice": lambda right, prompt: replace(
        right,
        tokens=prompt.tokens + right.tokens,
        loss_mask=[0] * len(prompt.tokens) + right.loss_mask,
        log_probs=[None] * len(prompt.tokens) + right.log_probs,
    ),
}


async def lengthens(prompt: Any, client: Any, tokenizer: Any) -> Any:
    """A context that grows in place: right if the prompt's tokens are the function's own."""
    context, size, log_probs = prompt.tokens, len(prompt.tokens), []
    for _ in range(2):
        made = await client.generate(context)
        context += made.tokens
        log_probs += made.log_probs
    prompt.record["level"] = "forged"
    tokens = context[size:]
    return RolloutSample(tokens=tokens, loss_mask=[1] * len(tokens), log_probs=log_probs, reward=0.5)


_KEPT: list[RolloutSample] = []


async def same_object(prompt: Any, client: Any, tokenizer: Any) -> Any:
    _KEPT.append(await _right(prompt, client))
    return _KEPT[0]


async def raises(prompt: Any, client: Any, tokenizer: Any) -> Any:
    await client.generate(prompt.tokens)
    if prompt.sample == 2:
        raise KeyError("the tool's reply has no 'result'")
    await asyncio.sleep(600)


async def exits(prompt: Any, client: Any, tokenizer: Any) -> Any:
    sys.exit(3)


async def cancels(prompt: Any, client: Any, tokenizer: Any) -> Any:
    raise asyncio.CancelledError


async def starts_a_task_that_exits(prompt: Any, client: Any, tokenizer: Any) -> Any:
    async def log() -> None:
        sys.exit(4)

    task = asyncio.create_task(log())
    await client.generate(prompt.tokens)
    await task


async def exits_in_a_callback(prompt: Any, client: Any, tokenizer: Any) -> Any:
    asyncio.get_running_loop().call_soon(sys.exit, 4)
    return await _right(prompt, client)


async def stops_in_a_thread(prompt: Any, client: Any, tokenizer: Any) -> Any:
    await asyncio.to_thread(next, iter(()))


async def never_returns(prompt: Any, client: Any, tokenizer: Any) -> Any:
    right = await _right(prompt, client)
    if prompt.sample == 2:
        await asyncio.Event().wait()
    return right


async def blocks(prompt: Any, client: Any, tokenizer: Any) -> Any:
    right = await _right(prompt, client)
    if prompt.sample == 2:
        time.sleep(600)
    return right


async def blocks_briefly(prompt: Any, client: Any, tokenizer: Any) -> Any:
    right = await _right(prompt, client)
    if prompt.sample == 2:
        time.sleep(7)
    return right


async def hangs_in_a_thread(prompt: Any, client: Any, tokenizer: Any) -> Any:
    await asyncio.to_thread(time.sleep, 600)


async def asks_for_ever(prompt: Any, client: Any, tokenizer: Any) -> Any:
    while True:
        await client.generate(prompt.tokens)


async def fills_up(prompt: Any, client: Any, tokenizer: Any) -> Any:
    await client.generate([1] * 64)


async def asks_without_tokens(prompt: Any, client: Any, tokenizer: Any) -> Any:
    await client.generate([])


async def asks_with_text(prompt: Any, client: Any, tokenizer: Any) -> Any:
    await client.generate(prompt.text)


async def asks_for_unknown(prompt: Any, client: Any, tokenizer: Any) -> Any:
    await client.generate([1, 43])


async def asks_for_nothing(prompt: Any, client: Any, tokenizer: Any) -> Any:
    await client.generate(prompt.tokens, max_new_tokens=0)


async def asks_elsewhere(prompt: Any, client: Any, tokenizer: Any) -> Any:
    await asyncio.to_thread(lambda: asyncio.run(client.generate(prompt.tokens)))


async def yields(prompt: Any, client: Any, tokenizer: Any) -> Any:
    yield None


def not_async(prompt: Any, client: Any, tokenizer: Any) -> Any:
    return None


async def two_arguments(prompt: Any, client: Any) -> Any:
    return None


NUMBER = 3


class Callable_:
    async def __call__(self, prompt: Any, client: Any, tokenizer: Any) -> Any:
        return await one_turn(prompt, client, tokenizer)


an_object = Callable_()


async def slow_for(prompt: Any, client: Any, tokenizer: Any, text: str, seconds: float, reward: bool = True) -> Any:
    """Two turns, between which a tool is slow for the prompt `text`."""
    first = await client.generate(prompt.tokens, max_new_tokens=2)
    await asyncio.sleep(seconds if prompt.text == text else 0.02)
    reply = tokenizer.encode("+")
    second = await client.generate([*prompt.tokens, *first.tokens, *reply], max_new_tokens=6)
    return RolloutSample(
        tokens=first.tokens + reply + second.tokens,
        loss_mask=[1] * len(first.tokens) + [0] + [1] * len(second.tokens),
        log_probs=first.log_probs + [0.0] + second.log_probs,
        reward=sum(second.tokens) % 7 if reward else None,
    )
