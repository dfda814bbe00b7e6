"""One process of judged code: its folder, its limits, a conversation with it by the clock, and its end."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from roll_batching.jobs.processes.child_process import start_cleanup
from roll_batching.jobs.rewards.judged_code.container import Contained
from roll_batching.jobs.rewards.judged_code.sandbox import best_sandbox, environment
from roll_batching.lifetime import die_with_parent

SUBPROCESS = "subprocess"
"""The value of `run` that asks for a process of this machine."""
_SET_DUMPABLE = 4
"""`PR_SET_DUMPABLE` of prctl(2)."""
_SECONDS_TO_END = 5.0
_SECONDS_TO_REMOVE = 60.0
_cleanups: list[subprocess.Popen[bytes]] = []
"""Kept, since closing their standard input starts them."""
_REMOVE = 'for _ in 1 2 3 4 5; do rm -rf -- "$1" && exit; chmod -R u+rwX -- "$1"; sleep 1; done'
"""By programs that follow folders however deep; processes that have been killed may write a moment longer."""


class JudgedProcess:
    """Runs the Python program `text` as `run` says, for at most `seconds`; as a context, it is ended with all it began.

    Its standard output goes to `output`, or to `receives`. `memory`, in bytes, bounds its address space under
    `run: subprocess`; a command bounds it itself.
    """

    def __init__(
        self,
        text: str,
        run: str | Sequence[str],
        seconds: float,
        memory: int,
        *,
        output: IO[bytes] | None = None,
    ) -> None:
        local = run == SUBPROCESS
        self._folder = Path(tempfile.mkdtemp(dir=_folder_of_this_process()))
        self._container = Contained([] if local else run)
        self._has_ended = False
        words, bind, variables = [*self._container.words, text], None, None
        self._signal = signal.SIGKILL
        try:
            if local:
                program = self._folder / ".program"  # a file may be longer than a word of a command
                program.write_text(text, encoding="utf-8", errors="replace")
                program.chmod(0o644)
                sandbox = best_sandbox()
                limits = {resource.RLIMIT_AS: memory, resource.RLIMIT_CPU: max(1, round(seconds))}
                bind = sandbox.bind(self._folder, limits)
                words = sandbox.command(self._folder, [sys.executable, "-I", str(program)])
                variables = environment(self._folder)
                if not sandbox.tool:
                    self._signal = signal.SIGTERM  # the keeper ends the others first
            else:
                parent = os.getpid()
                bind = lambda: die_with_parent(parent)  # noqa: E731
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if output is None else output,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                cwd=self._folder,
                env=variables,
                process_group=0,
                preexec_fn=bind,
            )
        except BaseException:
            self._container.close(ended=False)
            _remove(self._folder)
            raise
        self._until = time.monotonic() + seconds
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)

    def __enter__(self) -> JudgedProcess:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        self._end()
        self._container.close(ended=self._has_ended)
        _remove(self._folder)

    def send(self, data: bytes) -> bool:
        """Whether it took all of `data` from its standard input, in time."""
        assert self._process.stdin is not None
        file = self._process.stdin.fileno()
        while data:
            if not select.select([], [file], [], self._left())[1]:
                return False
            try:
                data = data[os.write(file, data) :]
            except OSError:  # it has closed its input
                return False
        return True

    def receives(self, expected: bytes) -> bool:
        """Whether the next bytes that it writes are `expected`, in time."""
        assert self._process.stdout is not None
        file, data = self._process.stdout.fileno(), b""
        while len(data) < len(expected):
            if not select.select([file], [], [], self._left())[0]:
                return False
            part = os.read(file, len(expected) - len(data))
            if not part:
                return False
            data += part
        return data == expected

    def ends(self) -> bool:
        """Whether it ends with 0, in time, once it has been told that nothing more is sent."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            return self._process.wait(self._left()) == 0
        except subprocess.TimeoutExpired:
            return False

    def _left(self) -> float:
        return max(0.0, self._until - time.monotonic())

    def _end(self) -> None:
        code = self._process.poll()
        self._has_ended = code is not None and code >= 0
        if code is None and self._signal is not signal.SIGKILL:
            self._process.send_signal(self._signal)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_SECONDS_TO_END)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@functools.cache
def _folder_of_this_process() -> Path:
    """A folder that is removed when this process ends, however that is.

    From now on others of this user cannot read this process's memory and environment: it knows what tests expect.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_DUMPABLE, 0)
    folder = Path(tempfile.mkdtemp(prefix="roll-batching-code-"))
    folder.chmod(0o711)  # for judged code that runs as another user
    _cleanups.append(start_cleanup(_REMOVE, str(folder), folder="/"))
    return folder


def _remove(folder: Path) -> None:
    """Removes `folder`; what cannot be removed now goes with this process's own."""
    with contextlib.suppress(subprocess.TimeoutExpired, OSError):
        subprocess.run(
            ["sh", "-c", _REMOVE, "sh", str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_SECONDS_TO_REMOVE,
            check=False,
        )
