"""Abuses of reward functions with verl's, slime's and ROLL's contracts, and of lines that no reward can score."""

from __future__ import annotations

import json
from typing import Any

from tests.campaigns.abuse.runner import DONE, FAILED, REFUSED, Abuse

_VERL = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    {}\n"
_NO_ANSWER = json.dumps({"prompt": "ab=", "answer": None}) + "\n"
_LINES = "".join(json.dumps({"prompt": f"{word}=", "answer": word}) + "\n" for word in ("ab", "ba", "cd", "dc"))


def _verl(name: str, body: str, code: int, *words: str, **more: Any) -> Abuse:
    """An abuse of verl's `compute_score` in a file, which runs `body`."""
    settings = {
        "reward_function": "verl_compute_score",
        "reward_args": {"path": "host.py"},
        "actor_train.data_args.response": "answer",
        **more.pop("settings", {}),
    }
    files = {"host.py": _VERL.format(body), **more.pop("files", {})}
    return Abuse(name=f"host reward: {name}", code=code, settings=settings, files=files, words=words, **more)


def _of(function: str, text: str, name: str, code: int, /, *words: str, **arguments: Any) -> Abuse:
    """An abuse of the contract `function`, whose module `host` has `text`."""
    settings = {"reward_function": function, "reward_args": arguments, "actor_train.data_args.response": "answer"}
    return Abuse(name=f"host reward: {name}", code=code, settings=settings, files={"host.py": text}, words=words)


HOST_REWARDS = [
    _verl("score and marks", "return {'score': len(solution_str) / 10, 'acc': True}", DONE),
    _verl("raises", "raise KeyError('gold')", FAILED, "rank ", "KeyError: 'gold'", "host.py"),
    _verl("sys.exit(0)", "import sys; sys.exit(0)", FAILED, "rank ", "SystemExit: 0"),
    _verl("a dict without a score", "return {'acc': 1.0}", FAILED, "which has no 'score'"),
    _verl("text", "return 'right'", FAILED, "returned a str, 'right', not a number"),
    _verl(
        "never returns",
        "import time; time.sleep(10**6)",
        FAILED,
        "did not return within 2 s on sample ",
        settings={"reward_timeout": 2},
    ),
    _verl("no such file", "return 1.0", REFUSED, "gone.py is no file", settings={"reward_args": {"path": "gone.py"}}),
    _verl(
        "no such function",
        "return 1.0",
        REFUSED,
        "has no 'score'",
        settings={"reward_args": {"path": "host.py", "name": "score"}},
    ),
    _verl("changes its record", "extra_info['num_turns'] = None; return len(solution_str) / 10", DONE),
    _verl(
        "lines without an answer",
        "return 1.0",
        FAILED,
        "prompts.jsonl:5",
        "no ground truth",
        files={"prompts.jsonl": _LINES + _NO_ANSWER},
        lines=4,
    ),
    _verl(
        "a coroutine that waits for ever",
        "import asyncio; return asyncio.Event().wait()",
        FAILED,
        "did not return within 2 s on sample ",
        settings={"reward_timeout": 2},
    ),
    _of("slime_custom_rm", "x = 1\n", "slime: no function", REFUSED, "not a function", path="host.x"),
    _of(
        "slime_custom_rm",
        "async def score(args, sample):\n    return args.rm_url\n",
        "slime: an option that is not set",
        FAILED,
        "args.rm_url is not set here",
        path="host.score",
    ),
    _of(
        "slime_custom_rm",
        "async def score(args, samples):\n    return [len(sample.response) / 10 for sample in samples]\n",
        "slime: lists of samples",
        DONE,
        path="host.score",
        grouped=True,
    ),
    _of(
        "response_and_answer",
        "def score(response, answer):\n    return response, 1.0\n",
        "roll: no such item",
        FAILED,
        "which has no 5",
        path="host.py",
        name="score",
        item=5,
    ),
]
