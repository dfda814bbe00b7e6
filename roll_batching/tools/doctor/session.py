"""One rank of an examination: calls with a time limit, and exchanges with the other ranks over the rendezvous store.

Exchanges use no process group, so that a collective that hangs on some ranks can still be reported by all of them.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import get_ident
from typing import Any, NamedTuple

import torch

from roll_batching.errors import RollBatchingError
from roll_batching.registry import describe_error

GRACE_SECONDS = 5.0
"""Time in which a rank must answer after the time limit of a check."""
_POLL_SECONDS = 0.02


class Answer(NamedTuple):
    """Status of a check on one rank, with the measured value (JSON) or a message."""

    status: str
    """value, error, or late: the rank hangs or is gone."""
    value: Any = None


@dataclass(kw_only=True)
class Session:
    """State of one rank, which its checks share."""

    store: Any
    rank: int
    world_size: int
    folder: Path
    full: bool
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    passed: dict[str, bool] = field(default_factory=dict)
    """Whether earlier checks passed, by name, and other conditions of later ones."""
    kept: dict[str, Any] = field(default_factory=dict)
    """Values of this rank for later checks."""
    worker: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))

    def call(self, function: Callable[[], Any], seconds: float) -> Answer:
        """Calls `function` in the worker thread; after `seconds` the answer says where it hangs."""
        thread = self.worker.submit(get_ident).result()
        future = self.worker.submit(function)
        try:
            return Answer("value", future.result(seconds))
        except (Exception, SystemExit) as error:
            if future.done():
                return Answer("error", str(error) if isinstance(error, RollBatchingError) else describe_error(error))
        frame = traceback.extract_stack(sys._current_frames()[thread])[-1]
        place = f"{frame.name} ({Path(frame.filename).name}:{frame.lineno})"
        return Answer("late", f"not done after {seconds:g} s, inside {place}")

    def exchange(self, topic: str, answer: Answer, seconds: float) -> list[Answer]:
        """All ranks' answers; those that rank 0 lacks after `seconds` and a grace are late. Collective."""
        self.store.set(f"doctor/{topic}/{self.rank}", json.dumps(answer))
        key, seconds = f"doctor/{topic}/all", seconds + GRACE_SECONDS
        if self.rank == 0:
            answers = self.collect(topic, seconds)
            lost = Answer("late", f"no answer within {seconds:g} s")
            self.store.set(key, json.dumps([answers.get(rank, lost) for rank in range(self.world_size)]))
        end = time.monotonic() + 2 * seconds
        while not self.store.check([key]):
            if time.monotonic() > end:
                raise RollBatchingError(f"{topic}: rank 0 does not answer rank {self.rank}: see whether it still runs")
            time.sleep(_POLL_SECONDS)
        return [Answer(*fields) for fields in json.loads(self.store.get(key))]

    def close(self) -> None:
        """Waits for all ranks; rank 0 comes when it has reported. Collective.

        A rank that ends with a failure lets torchrun end the others, and rank 0 may hold the store.
        """
        self.exchange("report", Answer("value"), GRACE_SECONDS)
        self.store.set(f"doctor/end/{self.rank}", json.dumps(Answer("value")))
        if self.rank == 0:
            self.collect("end", GRACE_SECONDS)

    def collect(self, topic: str, seconds: float) -> dict[int, Answer]:
        """The answers by rank that arrive within `seconds`; on rank 0."""
        answers: dict[int, Answer] = {}
        end = time.monotonic() + seconds
        while len(answers) < self.world_size and time.monotonic() < end:
            for rank in set(range(self.world_size)) - answers.keys():
                if self.store.check([key := f"doctor/{topic}/{rank}"]):
                    answers[rank] = Answer(*json.loads(self.store.get(key)))
            time.sleep(_POLL_SECONDS)
        return answers


Steps = Generator[Any, list[Any], tuple[list[str], str]]
"""A running check: yields the value of this rank, gets those of all, returns (problems, summary)."""
