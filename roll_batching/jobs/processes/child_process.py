"""Starting and ending child processes, and describing how they ended."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from multiprocessing.connection import Connection

from roll_batching.lifetime import end_session

_SAME_PATH = "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
"""Takes over our `sys.path`: the package need not be installed where the new interpreter starts."""
_SERVE = (
    "from roll_batching.lifetime import die_with_parent; die_with_parent(int(sys.argv[1])); "
    "from multiprocessing.connection import Connection; connection = Connection(int(sys.argv[2])); "
    "from {module} import serve; serve(connection, *map(int, sys.argv[3:]))"
)
"""Bound to the parent before the module's imports, which may take seconds."""


def python_command(code: str, *arguments: str) -> list[str]:
    """Command line of a new interpreter that runs `code` with our `sys.path`; `arguments` are its `sys.argv[1:]`."""
    return [sys.executable, "-u", "-c", _SAME_PATH + code, json.dumps(sys.path), *arguments]


def start_child_process(
    module: str, *numbers: int, environment: Mapping[str, str] | None = None
) -> tuple[subprocess.Popen[bytes], Connection]:
    """Starts a process that runs `serve(connection, *numbers)` of `module`, and returns our end of the connection.

    It leads a process group, inherits no descriptor but its end of the connection and output, and ends when this
    process does. `environment` defaults to this process's.
    """
    ours, theirs = multiprocessing.Pipe()
    arguments = map(str, (os.getpid(), theirs.fileno(), *numbers))
    process = subprocess.Popen(
        python_command(_SERVE.format(module=module), *arguments),
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        process_group=0,
        env=None if environment is None else dict(environment),
    )
    theirs.close()
    return process, ours


def start_cleanup(script: str, *arguments: str, folder: str | None = None) -> subprocess.Popen[bytes]:
    """A shell that runs `script` in `folder` once its `stdin` is closed, or this process has ended in any way.

    It runs in a separate session, so that signals to ours do not end it. `arguments` are the script's $1, $2, ...
    """
    return subprocess.Popen(
        ["sh", "-c", f"read -r _; {script}", "sh", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=folder,
        start_new_session=True,
    )


def kill_process_groups(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Kills processes that lead process groups, with their groups; returns when they have ended."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        process.wait()


def kill_sessions(processes: Collection[subprocess.Popen[bytes]]) -> None:
    """Kills processes that lead sessions, with all processes of the sessions; returns when they have ended."""
    for process in processes:
        if process.poll() is None:
            process.kill()
    for process in processes:
        end_session(process.pid)  # before `wait`, after which another process may get this id
        process.wait()


def describe_exit(code: int) -> str:
    """`with exit code 1` or `by signal 9 (SIGKILL)`, for a `returncode` of `subprocess`."""
    return f"by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"with exit code {code}"
