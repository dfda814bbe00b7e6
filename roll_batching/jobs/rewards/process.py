"""Runs a reward function in a process of its own: with limits, and harmless whatever it does there."""

from __future__ import annotations

import contextlib
import json
import os
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

from roll_batching.errors import ConfigError, DataError
from roll_batching.jobs.processes.child_process import describe_exit, kill_process_groups, start_child_process
from roll_batching.jobs.rewards.contract import Completion
from roll_batching.jobs.seeds import reward_seed
from roll_batching.registry import printable

_SECONDS_BETWEEN_LOOKS = 0.05
_SECONDS_TO_START = 60.0
"""What starting and importing may take at least, however short calls have to be."""
_LONGEST_ANSWER = 1 << 20
_HEADER = struct.Struct("!i")
"""What a message of `Connection` begins with: its length."""
_VARIABLES_WITHOUT_SECRETS = (
    "PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "PYTHONPATH", "LD_LIBRARY_PATH", "OMP_NUM_THREADS", "RANK",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RewardLimits:
    """What one call of a reward function may take."""

    seconds: float = 300.0
    memory: int | None = None
    """MiB beyond what its process has once the function is imported; None: no limit."""
    notice_after: float = 10.0
    """Whoever waits longer, in seconds, is told what for, and again after twice as long."""

    @property
    def start(self) -> float:
        """Seconds that starting a process and importing the function may take."""
        return max(self.seconds, _SECONDS_TO_START)


class RewardProcess:
    """One process with the reward function `path`, called with `arguments` by name.

    It starts with `start`, or with the first call, and again after one that had to be killed, or when somebody else has
    killed it. It ends with `close`, and with the process that it works for.
    """

    def __init__(
        self, path: str, arguments: Mapping[str, Any] | None, limits: RewardLimits, *, secrets: bool = True
    ) -> None:
        """`secrets` False: its environment has a few variables of this process, none of which holds a key."""
        self.path, self.arguments, self.limits, self.secrets = path, dict(arguments or {}), limits, secrets
        self.notice = ""
        """What the function says of its settings, once it has been started."""
        self.connection: Connection | None = None
        """What becomes readable when there is an answer; None while it does not run."""
        self._process: subprocess.Popen[bytes] | None = None
        self._calls, self._read = 0, b""
        self._sender: threading.Thread | None = None
        self._where, self._limit, self._asked, self._patience = "", 0.0, 0.0, 0.0

    def start(self) -> None:
        """Starts the process and imports the function, if that has not been done, or the process has been killed since.

        Raises ConfigError when the function cannot be found, imported or called with its arguments.
        """
        if self._process is not None:
            if (code := self._process.poll()) is None:
                return
            how = describe_exit(code)  # between two calls, so that no sample is to blame
            print(f"notice: a process of {self.path} ended {how} and is started again", file=sys.stderr, flush=True)
            self.close()
        environment = None
        if not self.secrets:
            environment = {name: os.environ[name] for name in _VARIABLES_WITHOUT_SECRETS if name in os.environ}
        self._process, self.connection = start_child_process(
            "roll_batching.jobs.rewards.worker", self.limits.memory or 0, environment=environment
        )
        self._calls, self._read = 0, b""
        try:
            self._send((self.path, self.arguments), "the import of its module", self.limits.start)
            while (answer := self.answer(wait=_SECONDS_BETWEEN_LOOKS)) is None:
                pass
        except DataError as failed:
            raise ConfigError(str(failed)) from None
        if "error" in answer:
            self.close()
            raise ConfigError(answer["error"])
        self.notice = str(answer.get("notice", ""))

    def ask(self, completion: Completion, sample: int, seed: int) -> None:
        """Calls the function on `completion`; `answer` says what came of it.

        `seed` and `sample`, its id, seed the function's random numbers.
        """
        self.start()
        self._calls += 1
        where = f"sample {sample} (prompt {_short(completion.prompt)}, response {_short(completion.response)})"
        self._send((self._calls, reward_seed(seed, sample), completion), where, self.limits.seconds)

    def answer(self, wait: float = 0.0) -> dict[str, Any] | None:
        """The answer to the latest call; None when there is none after `wait` seconds.

        Raises DataError naming sample, function and cure when the call fails, returns no finite number or malformed
        marks, takes too long, or ends its process.
        """
        try:
            said = self._said(wait)
            if said is None:
                self._look_at_the_clock()
                return None
        except DataError:
            self.close()
            raise
        except (EOFError, OSError, ValueError):
            raise DataError(f"reward function {self.path} failed on {self._where}: {self._how_it_ended()}") from None
        if "error" in said and self._calls:
            raise DataError(
                f"reward function {self.path} failed on {self._where}: {printable(said['error'])}. It must return a "
                "finite number or a roll_batching.jobs.rewards.Score"
            )
        return said

    def close(self) -> None:
        """Ends the process and what it has started. Safe to call twice."""
        if self._process is None or self.connection is None:
            return
        kill_process_groups([self._process])
        if self._sender is not None:
            self._sender.join()  # nobody reads at the other end any more
        self.connection.close()
        self._process = self.connection = self._sender = None

    def _send(self, message: Any, where: str, limit: float) -> None:
        assert self.connection is not None
        self._where, self._limit, self._asked = where, limit, time.monotonic()
        self._patience = self.limits.notice_after
        connection, data = self.connection, ForkingPickler.dumps(message)

        def send() -> None:
            with contextlib.suppress(OSError):  # it has ended: the answer says how
                connection.send_bytes(data)

        # In a thread, since a process that does not read would hold whoever sends it more than a socket takes.
        self._sender = threading.Thread(target=send, name="reward", daemon=True)
        self._sender.start()

    def _said(self, wait: float) -> dict[str, Any] | None:
        """What the process says to the latest call. Raises EOFError when it will say nothing more."""
        assert self.connection is not None and self._process is not None
        ended = self._process.poll() is not None
        if not self.connection.poll(0 if ended else wait):
            if ended:
                raise EOFError
            return None
        part = os.read(self.connection.fileno(), _LONGEST_ANSWER)
        if not part:
            raise EOFError
        self._read += part  # what there is of a message: the function may have written the beginning of one
        size = _HEADER.unpack_from(self._read)[0] if len(self._read) >= _HEADER.size else 0
        if not 0 <= size <= _LONGEST_ANSWER:
            raise ValueError("no message of ours")
        end = _HEADER.size + size
        if len(self._read) < end:
            return None
        message, self._read = self._read[_HEADER.size : end], self._read[end:]
        number, said = json.loads(message)
        return said if number == self._calls else None

    def _look_at_the_clock(self) -> None:
        waited = time.monotonic() - self._asked
        if waited > self._limit:
            raise DataError(
                f"reward function {self.path} did not return within {self._limit:g} s on {self._where}: raise "
                "reward_timeout (seconds per call), or give what it waits for a limit of its own"
            )
        if waited > self._patience:
            self._tell(waited)
            self._patience *= 2

    def _how_it_ended(self) -> str:
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        code = self._process.returncode
        self.close()
        if code is None:
            return "it has closed or misused the connection of its process: leave file descriptors above 2 alone"
        return f"its process ended {describe_exit(code)}; its output is above, or in the log of its rank"

    def _tell(self, seconds: float) -> None:
        rank = os.environ.get("RANK", "0")
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - seconds))
        print(
            f"notice: rank {rank} waits for reward function {self.path} on {self._where} since {since} "
            f"({seconds:.0f} s); reward_timeout ends the wait after {self._limit:g} s",
            file=sys.stderr,
            flush=True,
        )


def _short(text: str, limit: int = 40) -> str:
    return repr(text if len(text) <= limit else text[: limit - 3] + "...")
