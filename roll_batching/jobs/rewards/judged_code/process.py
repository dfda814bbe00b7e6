"""Runs the model's code in one process, here or in a container, with a folder, limits, and timed input and output.

A container belongs to its runtime, and outlives the client that started it. So each container gets a name, and a
remover: a shell that removes it when we close the shell's input or this process ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import resource
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from roll_batching.jobs.processes.child_process import notify, start_cleanup
from roll_batching.jobs.rewards.judged_code.sandbox import best_sandbox, environment
from roll_batching.lifetime import die_with_parent

RUNTIMES = ("docker", "nerdctl", "podman")
"""Clients whose `run` takes `--name`, and whose `rm --force` ends what has that name."""
_SECONDS_TO_REMOVE = 30.0


def runs_container(run: Sequence[str]) -> bool:
    """Whether the command `run` starts a container with one of `RUNTIMES`."""
    return bool(run) and Path(run[0]).name in RUNTIMES and list(run[1:2]) == ["run"]


def names_container(run: Sequence[str]) -> bool:
    """Whether the command `run` already has a `--name`."""
    return runs_container(run) and any(word == "--name" or word.startswith("--name=") for word in run)


class ContainerCommand:
    """`arguments`: the command line `run`; if it starts a container, with a `--name` by which `close` removes it."""

    def __init__(self, run: Sequence[str]) -> None:
        self.arguments = list(run)
        self._remover: subprocess.Popen[bytes] | None = None
        if runs_container(run):
            self._name = f"roll-batching-{secrets.token_hex(8)}"
            self.arguments[1:2] = ["run", "--name", self._name]
            self._remover = start_cleanup('exec "$@"', run[0], "rm", "--force", self._name)

    def close(self, *, exited: bool) -> None:
        """Removes the container, and waits for that; call it after the client has ended.

        `exited`: the client exited by itself, hence its container too, and the remover process is ended unused.
        """
        if self._remover is None:
            return  # `run` starts no container
        if exited:
            self._remover.kill()
        try:
            self._remover.communicate(timeout=_SECONDS_TO_REMOVE)  # closes its input, upon which it removes
        except subprocess.TimeoutExpired:
            notify(f"the container {self._name} is still being removed")


# ---- process


SUBPROCESS = "subprocess"
"""The value of `run` for a process on this machine."""
_SET_DUMPABLE = 4
"""`PR_SET_DUMPABLE` of prctl(2)."""
_TERMINATE_SECONDS = 5.0
_REMOVE_SECONDS = 60.0
_cleanups: list[subprocess.Popen[bytes]] = []
"""Kept until this process ends: a cleanup starts when its standard input is closed, also by garbage collection."""
_REMOVE = 'for _ in 1 2 3 4 5; do rm -rf -- "$1" && exit; chmod -R u+rwX -- "$1"; sleep 1; done'
"""rm and chmod handle folders of any depth. Retried, since killed processes may write a moment longer."""


class JudgedProcess:
    """Runs the Python program `text` by `run`, for at most `seconds`; leaving the context ends all its processes.

    The program's standard output goes to `output`, or is read by `receive`. `memory`, in bytes, limits the address
    space under `run: subprocess`; with a command as `run`, the command must limit the memory.
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
        self._folder = Path(tempfile.mkdtemp(dir=_process_folder()))
        self._container = ContainerCommand([] if local else run)
        self._has_exited = False
        command, preexec, variables = [*self._container.arguments, text], None, None
        self._signal = signal.SIGKILL
        try:
            if local:
                program = self._folder / ".program"  # an argument has a length limit, a file has not
                program.write_text(text, encoding="utf-8", errors="replace")
                program.chmod(0o644)
                sandbox = best_sandbox()
                limits = {resource.RLIMIT_AS: memory, resource.RLIMIT_CPU: max(1, round(seconds))}
                preexec = sandbox.preexec(self._folder, limits)
                command = sandbox.command(self._folder, [sys.executable, "-I", str(program)])
                variables = environment(self._folder)
                if not sandbox.tool:
                    self._signal = signal.SIGTERM  # the supervisor first kills its descendants
            else:
                parent = os.getpid()
                preexec = lambda: die_with_parent(parent)  # noqa: E731
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if output is None else output,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                cwd=self._folder,
                env=variables,
                process_group=0,
                preexec_fn=preexec,
            )
        except BaseException:
            self._container.close(exited=False)
            _remove_folder(self._folder)
            raise
        self._deadline = time.monotonic() + seconds
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
        self._container.close(exited=self._has_exited)
        _remove_folder(self._folder)

    def send(self, data: bytes) -> bool:
        """Writes `data` to standard input; returns False at the time limit, or when the program has closed it."""
        assert self._process.stdin is not None
        file = self._process.stdin.fileno()
        while data:
            if not select.select([], [file], [], self._remaining())[1]:
                return False
            try:
                data = data[os.write(file, data) :]
            except OSError:  # closed
                return False
        return True

    def receive(self, size: int) -> bytes:
        """The next `size` bytes of the program's output; fewer at the end of the output or at the time limit."""
        assert self._process.stdout is not None
        file, data = self._process.stdout.fileno(), b""
        while len(data) < size and select.select([file], [], [], self._remaining())[0]:
            part = os.read(file, size - len(data))
            if not part:
                break
            data += part
        return data

    def finish(self) -> bool:
        """Closes the program's standard input; returns whether it then exits with 0 within the time limit."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            return self._process.wait(self._remaining()) == 0
        except subprocess.TimeoutExpired:
            return False

    def _remaining(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def _end(self) -> None:
        """Ends the process and its group; notes whether it had exited by itself before."""
        code = self._process.poll()
        self._has_exited = code is not None and code >= 0  # below 0: a signal ended it
        if code is None and self._signal is not signal.SIGKILL:
            self._process.send_signal(self._signal)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_TERMINATE_SECONDS)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@functools.cache
def _process_folder() -> Path:
    """Creates a folder that is removed when this process ends, in any way.

    It also hides this process's memory and environment from other processes of its user, since they hold the tests'
    answers.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_DUMPABLE, 0)
    folder = Path(tempfile.mkdtemp(prefix="roll-batching-code-"))
    folder.chmod(0o711)  # the model's code may run as another user
    _cleanups.append(start_cleanup(_REMOVE, str(folder), folder="/"))
    return folder


def _remove_folder(folder: Path) -> None:
    """Removes `folder`; the rest is removed with this process's folder."""
    with contextlib.suppress(subprocess.TimeoutExpired, OSError):
        subprocess.run(
            ["sh", "-c", _REMOVE, "sh", str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_REMOVE_SECONDS,
            check=False,
        )
