"""Runs a reward function in a process of its own: with a time limit, and harmless whatever it does there."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from roll_batching.config import JobConfig
from roll_batching.errors import ConfigError, DataError
from roll_batching.rl.rewards import MOST_MARKS, Completion, Scored

_CHILD = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from roll_batching.rl.reward_child import serve; serve(int(sys.argv[2]), int(sys.argv[3]))"
)
_SECONDS_BEFORE_NOTICE = 10.0
_SECONDS_BETWEEN_LOOKS = 0.05
_SECONDS_TO_START = 60.0
"""What starting and importing may take at least, however short calls have to be."""
_LONGEST_ANSWER = 1 << 20


class RewardProcess:
    """The reward function `path`, called with `arguments` by name, `limit` seconds at most per call.

    The process starts with the first call, or with `start`, and again after one that had to be killed. It ends with
    `close`, and with the process that it works for. Whoever waits longer than `notice_after` seconds is told what
    for, and again after twice as long.
    """

    def __init__(
        self,
        path: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        limit: float = 300.0,
        notice_after: float = _SECONDS_BEFORE_NOTICE,
    ) -> None:
        self.path, self.arguments = path, dict(arguments or {})
        self.limit, self.notice_after = limit, notice_after
        self._patience = notice_after
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._calls = 0

    def __enter__(self) -> RewardProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def start_limit(self) -> float:
        """Seconds that starting the process and importing the function may take."""
        return max(self.limit, _SECONDS_TO_START)

    def start(self) -> None:
        """Starts the process and imports the function, if that has not been done.

        Raises ConfigError when the function cannot be found, imported or called with its arguments.
        """
        if self._process is not None:
            return
        ours, theirs = multiprocessing.Pipe()
        # Handed down as it is, since the package need not be installed for an interpreter that starts anew.
        command = [sys.executable, "-u", "-c", _CHILD, json.dumps(sys.path), str(theirs.fileno()), str(os.getpid())]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, process_group=0)
        theirs.close()
        self._connection, self._calls = ours, 0
        try:
            error = self._ask((self.path, self.arguments), "the import of its module", self.start_limit).get("error")
        except DataError as failed:
            raise ConfigError(str(failed)) from None
        if error is not None:
            self.close()
            raise ConfigError(error)

    def score(self, completions: Sequence[Completion], ids: Sequence[int], *, seed: int) -> Scored:
        """Call the function on each completion; `ids` name the samples in errors.

        `seed` and the id seed the function's random numbers. Raises DataError naming sample, function and cure when
        a call fails, returns no finite number or malformed marks, takes too long, or ends its process.
        """
        self._patience = self.notice_after
        answers = [self._score(c, int(i), seed) for c, i in zip(completions, ids, strict=True)]
        names = sorted({name for answer in answers for name in answer["marks"]})
        if len(names) > MOST_MARKS:
            raise DataError(
                f"reward function {self.path} has used {len(names):,} names of marks, such as {names[0]!r} and "
                f"{names[-1]!r}: each is a metric, and {MOST_MARKS} are the most"
            )
        return Scored(
            rewards=np.array([answer["reward"] for answer in answers], dtype=np.float64),
            marks={name: np.array([answer["marks"].get(name, False) for answer in answers]) for name in names},
        )

    def close(self) -> None:
        """Ends the process and what it has started. Safe to call twice."""
        if self._process is None or self._connection is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._connection.close()
        self._process = self._connection = None

    def _score(self, completion: Completion, sample: int, seed: int) -> dict[str, Any]:
        self.start()
        where = f"sample {sample} (prompt {_short(completion.prompt)}, response {_short(completion.response)})"
        self._calls += 1
        own = int(np.random.SeedSequence([seed, sample]).generate_state(1)[0])
        answer = self._ask((self._calls, own, completion), where, self.limit)
        if "error" in answer:
            raise DataError(
                f"reward function {self.path} failed on {where}: {answer['error']}. It must return a finite number or "
                "a roll_batching.rl.rewards.Score"
            )
        return answer

    def _ask(self, message: Any, where: str, limit: float) -> dict[str, Any]:
        """What the process answers to `message`; it is closed when there is no answer."""
        assert self._connection is not None
        started = time.monotonic()
        try:
            self._connection.send(message)
            while True:
                answer = self._answer()
                if answer is not None:
                    return answer
                waited = time.monotonic() - started
                if waited > limit:
                    raise DataError(
                        f"reward function {self.path} did not return within {limit:g} s on {where}: raise "
                        "reward_timeout (seconds per call), or give what it waits for a limit of its own"
                    )
                if waited > self._patience:
                    self._tell(where, waited, limit)
                    self._patience *= 2
        except DataError:
            self.close()
            raise
        except (EOFError, OSError, ValueError):
            raise DataError(f"reward function {self.path} failed on {where}: {self._how_it_ended()}") from None

    def _answer(self) -> dict[str, Any] | None:
        """The answer to the latest call, or None when there is none yet. Raises EOFError when there will be none."""
        assert self._connection is not None and self._process is not None
        ended = self._process.poll() is not None
        if not self._connection.poll(0 if ended else _SECONDS_BETWEEN_LOOKS):
            if ended:
                raise EOFError
            return None
        number, said = json.loads(self._connection.recv_bytes(_LONGEST_ANSWER))
        return said if number == self._calls else None

    def _how_it_ended(self) -> str:
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        code = self._process.returncode
        self.close()
        if code is None:
            return "it has closed or misused the connection of its process: leave file descriptors above 2 alone"
        how = f"by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"with exit code {code}"
        return f"its process ended {how}; its output is above"

    def _tell(self, where: str, seconds: float, limit: float) -> None:
        rank = os.environ.get("RANK", "0")
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - seconds))
        print(
            f"notice: rank {rank} waits for reward function {self.path} on {where} since {since} ({seconds:.0f} s); "
            f"reward_timeout ends the wait after {limit:g} s",
            file=sys.stderr,
            flush=True,
        )


def reward_of(job: JobConfig) -> RewardProcess | None:
    """The reward that `job` names, not yet started; None for a job without an RL phase."""
    if job.task != "grpo" or not job.max_steps or job.reward_function is None:
        return None
    return RewardProcess(job.reward_function, job.reward_args, limit=job.reward_timeout)


def _short(text: str, limit: int = 40) -> str:
    return repr(text if len(text) <= limit else text[: limit - 3] + "...")
