"""Runs a reward function in a worker process, with limits, so that its crashes and hangs do not end the rank."""

from __future__ import annotations

import contextlib
import json
import os
import struct
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

from roll_batching.errors import ConfigError, DataError
from roll_batching.jobs.config.rewards import name_of
from roll_batching.jobs.processes.child_process import describe_exit, kill_process_groups, notify, start_child_process
from roll_batching.jobs.rewards.contract import Completion, PromptLine
from roll_batching.jobs.seeds import reward_seed
from roll_batching.registry import printable

_POLL_SECONDS = 0.05
_START_SECONDS = 60.0
"""Least limit for starting and importing, however short `reward_timeout` is."""
_LONGEST_REPLY = 1 << 20
"""Bytes."""
_HEADER = struct.Struct("!i")
"""A message of `Connection` begins with its length."""
_VARIABLES_WITHOUT_SECRETS = (
    "PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "PYTHONPATH", "LD_LIBRARY_PATH", "OMP_NUM_THREADS", "RANK",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RewardLimits:
    """Time and memory limits of a call of a reward function."""

    seconds: float = 300.0
    memory: int | None = None
    """MiB that a call may allocate beyond the memory after the import; None: no limit."""
    notice_after: float = 10.0
    """Seconds of waiting before a notice; the next follow after twice as long each."""

    @property
    def start(self) -> float:
        """Seconds for starting the worker and importing the function."""
        return max(self.seconds, _START_SECONDS)


class RewardProcess:
    """One worker process with the reward function `path`, called with keyword `arguments`.

    It starts in `start` or the first call, and again after it was killed, by a limit or from outside. It ends in
    `close`, and with this process.
    """

    def __init__(
        self, path: str, arguments: Mapping[str, Any] | None, limits: RewardLimits, *, secrets: bool = True
    ) -> None:
        """`secrets` False: the worker's environment has only a few of our variables, and no keys."""
        self.path, self.arguments, self.limits, self.secrets = path, dict(arguments or {}), limits, secrets
        self.name = name_of(path)
        """Name of the function in the job's file, for messages."""
        self._cure = "reward_failure: zero or drop goes on without such rewards"
        if self.name == path:
            self._cure = "It must return a finite number or a roll_batching.jobs.rewards.Score"
        self.notice, self.checks = "", False
        """After the start: the function's notice about its settings, and whether it has `check_record`."""
        self.connection: Connection | None = None
        """Readable when there is a result; None while the worker does not run."""
        self._process: subprocess.Popen[bytes] | None = None
        self._calls, self._read = 0, b""
        self._sender: threading.Thread | None = None
        self._subject, self._limit, self._sent, self._next_notice = "", 0.0, 0.0, 0.0

    def start(self) -> None:
        """Starts the worker, which imports the function, unless it runs already.

        Raises ConfigError when the function cannot be found, imported or called with its arguments.
        """
        if self._process is not None:
            if (code := self._process.poll()) is None:
                return
            # It ended between two calls, so that no sample is to blame.
            notify(f"a process of {self.name} ended {describe_exit(code)} and is started again")
            self.close()
        environment = None
        if not self.secrets:
            environment = {name: os.environ[name] for name in _VARIABLES_WITHOUT_SECRETS if name in os.environ}
        self._process, self.connection = start_child_process(
            "roll_batching.jobs.rewards.worker", self.limits.memory or 0, environment=environment
        )
        self._calls, self._read = 0, b""
        try:
            self._send(
                (self.path, self.arguments, self.name != self.path), "the import of its module", self.limits.start
            )
            while (answer := self.result(wait=_POLL_SECONDS)) is None:
                pass
        except DataError as failed:
            raise ConfigError(str(failed)) from None
        if "error" in answer:
            self.close()
            raise ConfigError(answer["error"])
        self.notice, self.checks = str(answer.get("notice", "")), bool(answer.get("checks"))

    def call(self, completion: Completion, sample: int, seed: int) -> None:
        """Starts a call with `completion`; `result` returns its result.

        `seed` and `sample`, the sample's id, seed the function's random numbers.
        """
        self.start()
        self._calls += 1
        subject = f"sample {sample} (prompt {_short(completion.prompt)}, response {_short(completion.response)})"
        self._send((self._calls, reward_seed(seed, sample), completion), subject, self.limits.seconds)

    def check(self, lines: Sequence[PromptLine], subject: str) -> None:
        """Starts a call of `check_record` with each of `lines`; `result` returns their `faults`."""
        self.start()
        self._calls += 1
        self._send((self._calls, 0, list(lines)), subject, self.limits.start)

    def result(self, wait: float = 0.0) -> dict[str, Any] | None:
        """Returns the result of the latest call, or None if there is none after `wait` seconds.

        Raises DataError, with sample, function and remedy, when the call fails, returns no finite number or invalid
        marks, exceeds its time limit, or ends its worker.
        """
        try:
            reply = self._receive(wait)
            if reply is None:
                self._check_time()
                return None
        except DataError:
            self.close()
            raise
        except (EOFError, OSError, ValueError):
            raise DataError(f"reward function {self.name} failed on {self._subject}: {self._describe_end()}") from None
        if "error" in reply and self._calls:
            raise DataError(
                f"reward function {self.name} failed on {self._subject}: {printable(reply['error'])}. {self._cure}"
            )
        return reply

    def close(self) -> None:
        """Ends the worker and its child processes. Safe to call twice."""
        if self._process is None or self.connection is None:
            return
        kill_process_groups([self._process])
        if self._sender is not None:
            self._sender.join()  # its write fails now that the other end is closed
        self.connection.close()
        self._process = self.connection = self._sender = None

    def _send(self, message: Any, subject: str, limit: float) -> None:
        """Sends a message without waiting for the answer, which is due within `limit` seconds.

        `subject` names the work in errors.
        """
        assert self.connection is not None
        self._subject, self._limit, self._sent = subject, limit, time.monotonic()
        self._next_notice = self.limits.notice_after
        connection, data = self.connection, ForkingPickler.dumps(message)

        def send() -> None:
            with contextlib.suppress(OSError):  # the worker has ended, which `result` reports
                connection.send_bytes(data)

        # In a thread: sending more than the socket's buffer blocks when the worker does not read.
        self._sender = threading.Thread(target=send, name="reward", daemon=True)
        self._sender.start()

    def _receive(self, wait: float) -> dict[str, Any] | None:
        """Returns the reply to the latest call, None if it is incomplete. Raises EOFError when the worker has ended."""
        assert self.connection is not None and self._process is not None
        ended = self._process.poll() is not None
        if not self.connection.poll(0 if ended else wait):
            if ended:
                raise EOFError
            return None
        part = os.read(self.connection.fileno(), _LONGEST_REPLY)
        if not part:
            raise EOFError
        self._read += part  # not `recv`, which would block: the function may have written an incomplete message
        size = _HEADER.unpack_from(self._read)[0] if len(self._read) >= _HEADER.size else 0
        if not 0 <= size <= _LONGEST_REPLY:
            raise ValueError("not a message of the worker")
        end = _HEADER.size + size
        if len(self._read) < end:
            return None
        message, self._read = self._read[_HEADER.size : end], self._read[end:]
        call_number, reply = json.loads(message)
        return reply if call_number == self._calls else None  # else of an earlier call, which nobody awaits

    def _check_time(self) -> None:
        """Raises DataError when the call exceeds its time limit; prints a notice now and then before."""
        waited = time.monotonic() - self._sent
        if waited > self._limit:
            raise DataError(
                f"reward function {self.name} did not return within {self._limit:g} s on {self._subject}: raise "
                "reward_timeout (seconds per call), or set a shorter timeout inside the function"
            )
        if waited > self._next_notice:
            since = time.strftime("%H:%M:%S", time.localtime(time.time() - waited))
            notify(
                f"rank {os.environ.get('RANK', '0')} waits for reward function {self.name} on {self._subject} since "
                f"{since} ({waited:.0f} s); reward_timeout ends the wait after {self._limit:g} s"
            )
            self._next_notice *= 2

    def _describe_end(self) -> str:
        """Describes how the worker ended, and closes it."""
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        code = self._process.returncode
        self.close()
        if code is None:
            return "it has closed or misused the connection of its process: leave file descriptors above 2 alone"
        return f"its process ended {describe_exit(code)}; its output is above, or in the log of its rank"


def _short(text: str, limit: int = 40) -> str:
    return repr(text if len(text) <= limit else text[: limit - 3] + "...")
