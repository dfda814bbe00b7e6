"""Abuses of rollout functions: what they return, raise, change and end."""

from __future__ import annotations

from typing import Any

from tests.campaigns.abuse.directories import models, nothing_written
from tests.campaigns.abuse.runner import DONE, FAILED, REFUSED, Abuse
from tests.campaigns.abuse.scenes import complete

_FUNCTION = """import asyncio, os, signal, sys, time
from dataclasses import replace
from roll_batching.jobs.rollouts import RolloutSample
async def rollout(prompt, client, tokenizer):
    made = await client.generate(prompt.tokens)
    right = RolloutSample(
        tokens=made.tokens, loss_mask=[1] * len(made.tokens), log_probs=made.log_probs, reward=len(made.tokens) / 10
    )
    {body}
"""
ROLLING: dict[str, Any] = {"rollout_function": "rolling:rollout", "reward_function": None}
"""Settings of a job whose rollout function returns the rewards."""
FAULT = ("rollout function", "rolling:rollout failed on rollout ")


def _rolled(name: str, body: str, *words: str, code: int = FAILED, **options: Any) -> Abuse:
    """Abuse of a job whose rollout function ends with `body`; `right` is a correct sample."""
    settings = {**ROLLING, **options.pop("settings", {})}
    files = {"rolling.py": _FUNCTION.format(body=body)}
    return Abuse(name=f"rollout: {name}", code=code, settings=settings, files=files, words=words, **options)


def _unusable(name: str, path: str, text: str, *words: str, code: int = FAILED) -> Abuse:
    return Abuse(
        name=f"rollout: {name}",
        code=code,
        seconds=60,
        settings={**ROLLING, "rollout_function": path},
        files={"rolling.py": text},
        words=words,
        lines=3,
        scene=models(left=nothing_written),
    )


LENGTHENED = """context = prompt.tokens
    context += made.tokens
    prompt.record["answer"] = "forged"
    return right"""

ROLLOUTS = [
    _rolled("an ordinary job", "return right", code=DONE, scene=complete),
    _rolled("raises", "raise KeyError('no tool')", *FAULT, "KeyError: 'no tool' at ", "rolling.py:"),
    _rolled("returns two samples", "return [right, replace(right, reward=0.0)]", code=DONE, scene=complete),
    _rolled("returns a sample twice", "return [right, right]", *FAULT, "an object that it has returned for another"),
    _rolled("returns no sample", "return []", *FAULT, "it returned no sample"),
    _rolled(
        "NaN for a log-prob", "return replace(right, log_probs=[float('nan')] * len(made.tokens))", *FAULT, "is nan"
    ),
    _rolled("tokens outside the vocabulary", "return replace(right, tokens=[9] * len(made.tokens))", *FAULT, "is 9"),
    _rolled("no tokens", "return replace(right, tokens=[], loss_mask=[], log_probs=[])", *FAULT, "tokens is empty"),
    _rolled("a forged reward", "return replace(right, reward='1000')", *FAULT, "reward: it returned a str"),
    _rolled(
        "a reward beside a reward function",
        "return right",
        *FAULT,
        "reward is set, and the job has a reward function as well",
        settings={"reward_function": "scoring:reward"},
    ),
    _rolled(
        "never returns",
        "await asyncio.sleep(100000)",
        "neither returned nor called its client within 2 s (rollout_function_timeout)",
        settings={"rollout_function_timeout": 2},
    ),
    _rolled(
        "blocks its thread",
        "time.sleep(100000)",
        "has blocked its event loop at ",
        "rolling.py:",
        settings={"rollout_function_timeout": 2},
    ),
    _rolled("sys.exit(0)", "sys.exit(0)", *FAULT, "SystemExit: 0"),
    _rolled(
        "sys.exit(0) in its own task",
        "asyncio.get_running_loop().call_soon(sys.exit, 0); await asyncio.sleep(100000)",
        "rolling:rollout failed in a task or callback that it started: SystemExit: 0",
    ),
    _rolled("a reward of 5,000 digits", "return replace(right, reward=10**5000)", *FAULT, "which no float can hold"),
    _rolled(
        "StopIteration in a thread",
        "await asyncio.to_thread(next, iter(()))",
        *FAULT,
        "a function in a thread raised StopIteration",
    ),
    _rolled("os._exit(0)", "os._exit(0)", "ended with exit code 0 before the job was complete", lines=2),
    _rolled("kills itself", "os.kill(os.getpid(), signal.SIGKILL)", "ended by signal 9 (SIGKILL)", lines=2),
    _rolled("lengthens its prompt and forges its record", LENGTHENED, code=DONE, scene=complete),
    _rolled(
        "prints garbage",
        "os.write(1, b'\\xff\\xfe\\x00\\x1b[2J'); print('x' * 100000); return right",
        code=DONE,
        scene=complete,
    ),
    _unusable(
        "not async", "rolling:rollout", "def rollout(prompt, client, tokenizer):\n    return None\n", "not async"
    ),
    _unusable("no such module", "no_such:rollout", "", "cannot import 'no_such'"),
    _unusable(
        "a path with ..",
        "../rolling:rollout",
        "",
        "rollout_function: '../rolling:rollout' names no function: write it as package.module:function",
        code=REFUSED,
    ),
    _unusable("a module that exits", "rolling:rollout", "import sys\nsys.exit(0)\n", "SystemExit: 0"),
]
