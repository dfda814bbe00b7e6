"""Abuses of texts, tools and tests of code, and of places where files are read or written."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.campaigns.abuse.runner import FAILED, REFUSED, Abuse, Lost

_CLI = ("-m", "roll_batching.cli")


def _lines(*records: dict[str, Any]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def _judged(name: str, tests: Any, *words: str) -> Abuse:
    """Lines whose `test_cases` no code can pass or fail."""
    good = {"prompt": "ab=", "answer": "ab", "test_cases": ["assert f() == 1"]}
    files = {"prompts.jsonl": _lines(good, good, good, {**good, "test_cases": tests})}
    settings = {"reward_function": "code_tests", "reward_args": {"run": "subprocess"}}
    return Abuse(
        name=f"texts: {name}",
        code=FAILED,
        settings=settings,
        files=files,
        words=("prompts.jsonl:4", *words),
        lines=6,
    )


@contextlib.contextmanager
def _pipe(home: Path, name: str) -> Iterator[Lost]:
    (home / name).unlink(missing_ok=True)
    (home / name).parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(home / name)
    yield lambda: ""


def _piped(name: str, pipe: str, arguments: tuple[str, ...], *words: str, code: int = REFUSED) -> Abuse:
    """A command that meets a pipe without a writer where it expects a file."""
    return Abuse(
        name=f"texts: {name}",
        code=code,
        arguments=(*_CLI, *arguments),
        words=words,
        scene=lambda home: _pipe(home, pipe),
        seconds=60,
        lines=3,
    )


TEXTS = [
    _judged("a test without an assertion", ["x = 1"], "asserts nothing"),
    _judged("an assertion under a condition that is false", ["if False:\n    assert f() == 1"], "asserts nothing"),
    _judged("an assertion about nothing", ["assert True"], "asserts nothing"),
    _judged("a test that is no Python", ["assert f( == 1"], "a test is no Python"),
    _judged("tests that are no JSON", "[1", "is no JSON of a list of tests"),
    Abuse(
        name="texts: a reward that fails names the user's line",
        code=FAILED,
        files={
            "scoring.py": "def reward(completion):\n    return helper(completion)\n\n\ndef helper(x):\n    x.gone\n"
        },
        words=("rank ", "scoring.py:6"),
    ),
    Abuse(
        name="texts: a loss that fails names the user's line",
        code=FAILED,
        settings={"loss_function": "scoring:Mine"},
        files={
            "scoring.py": "from roll_batching.losses import PolicyLoss\n"
            "def reward(completion):\n    return completion.tokens / 10\n"
            "class Mine(PolicyLoss):\n    def token_loss(self, tokens):\n        return tokens.gone\n"
        },
        lines=20,
        words=("rank ", "scoring.py:6"),
    ),
    _piped("prompts from a pipe", "prompts.jsonl", ("train", "--config", "job.yaml"), "prompts.jsonl", code=FAILED),
    _piped("a job from a pipe", "job.yaml", ("train", "--config", "job.yaml"), "job.yaml"),
    _piped(
        "lengths from a pipe", "lengths.csv", ("plan", "lengths.csv", "--dp", "2", "--max-tokens", "64"), "lengths.csv"
    ),
    Abuse(
        name="texts: a picture at the root",
        code=REFUSED,
        files={"lengths.csv": "length\n9\n30\n"},
        arguments=(
            *_CLI,
            "plan",
            "lengths.csv",
            "--dp",
            "2",
            "--max-tokens",
            "64",
            "--plot",
            "/no/such/folder/plan.png",
        ),
        words=("/no/such/folder",),
        seconds=60,
    ),
]
