"""Faulty reward functions, which tests name by path."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np

from roll_batching.jobs.rewards import Completion, Score


def tokens(completion: Completion) -> float:
    return completion.tokens / 4


def takes(completion: Completion, what: str) -> Any:
    """One of the values that a function may return by right."""
    if what == "tensor":
        import torch

        return torch.tensor(1.5)
    return {
        "int": 3,
        "bool": True,
        "numpy": np.float32(0.5),
        "array of none": np.array(2),
        "marks": Score(reward=np.int64(1), marks={"right": np.bool_(True), "wrong": 0}),
    }[what]


def draws(completion: Completion) -> float:
    return random.random() + np.random.random()


def slow(completion: Completion, seconds: float) -> float:
    time.sleep(seconds)
    return 1.0


def slow_on_rank_1(completion: Completion, seconds: float) -> float:
    if os.environ["RANK"] == "1":
        time.sleep(seconds)
    return completion.tokens / 10


def never(completion: Completion) -> float:
    while True:
        pass


def leaves_a_command(completion: Completion) -> float:
    subprocess.Popen(["sleep", "1234567"])
    time.sleep(60)
    return 0.0


def forks(completion: Completion) -> float:
    """Returns in two processes, with answers of their own."""
    return 1.0 if os.fork() else 2.0


def forks_and_waits(completion: Completion) -> float:
    """The copy waits for ever, holding all that was open."""
    if os.fork() == 0:
        time.sleep(1000)
    return 1.0


def closes_output(completion: Completion) -> float:
    os.closerange(0, 3)
    return 1.0


def prints_junk(completion: Completion) -> float:
    sys.stdout.write("[1, {}]\x00\xff" * 1000)
    sys.stdout.flush()
    return 1.0


def reads_input(completion: Completion) -> float:
    return float(len(sys.stdin.read()))


class Unshowable(Exception):
    def __init__(self) -> None:
        self.kept = lambda: None  # cannot be pickled

    def __str__(self) -> str:
        raise RuntimeError("no")


def fails(completion: Completion, how: str) -> Any:
    """For the response '#99' only, so that the sample can be told."""
    if completion.response != "#99":
        return 1.0
    return _FAILURES[how](completion)


def raises(error: BaseException) -> Any:
    raise error


def scribbles(completion: Completion) -> float:
    """Writes whole messages of junk into whatever is open."""
    for descriptor in range(3, 1000):
        with contextlib.suppress(OSError):
            os.write(descriptor, b"\x00\x00\x00\x02hi")
    return 1.0


def stops_later(completion: Completion) -> float:
    """Answers, and has its process stopped a moment later."""
    here = os.getpid()
    if os.fork() == 0:
        time.sleep(0.3)
        os.kill(here, signal.SIGSTOP)
        os._exit(0)
    return 1.0


def begins_a_message(completion: Completion) -> float:
    """Writes the length of a long message, and none, before it answers."""
    for descriptor in range(3, 1024):  # the socket has the number that it had where it was made
        with contextlib.suppress(OSError):
            os.write(descriptor, b"\x00\x00\x10\x00")
    return 1.0


def deep(completion: Completion) -> Any:
    return deep(completion)


async def later(completion: Completion) -> float:
    await asyncio.sleep(0)
    return 1.0


_FAILURES = {
    "nan": lambda c: float("nan"),
    "infinity": lambda c: Score(reward=float("inf")),
    "none": lambda c: None,
    "text": lambda c: "1.0",
    "huge": lambda c: 10**400,
    "overflowing": lambda c: -1e39,
    "list": lambda c: [1.0],
    "array": lambda c: np.ones(1),
    "coroutine": later,
    "missing key": lambda c: c.record["missing"],
    "unshowable": lambda c: raises(Unshowable()),
    "deep": deep,
    "marks of none": lambda c: Score(reward=1.0, marks=None),  # type: ignore[arg-type]
    "marks of text": lambda c: Score(reward=1.0, marks={"right": "yes"}),  # type: ignore[dict-item]
    "marks of nothing": lambda c: Score(reward=1.0, marks={"": True}),
    "marks without end": lambda c: Score(reward=1.0, marks={str(i): True for i in range(100_000)}),
    "score of text": lambda c: Score(reward="1"),  # type: ignore[arg-type]
    "sys.exit": lambda c: sys.exit(0),
    "os._exit": lambda c: (print("last words"), os._exit(0)),
    "killed": lambda c: os.kill(os.getpid(), signal.SIGKILL),
    "crash": lambda c: os.kill(os.getpid(), signal.SIGSEGV),
    "scribbles": scribbles,
    "escapes": lambda c: raises(RuntimeError("\x1b[31mred\x07\r\n" + "line\n" * 2000)),
    "an escape as a mark": lambda c: Score(reward=1.0, marks={"\x1b[2J": True}),
    "closes everything": lambda c: os.closerange(0, 1000),
}
