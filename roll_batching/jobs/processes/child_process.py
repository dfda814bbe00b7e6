"""Starts and ends child processes, describes their end, and has the variables that tell a process its rank."""

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


def notify(message: str) -> None:
    """Prints a notice to standard error, where the launcher and the report find it."""
    print(f"notice: {message}", file=sys.stderr, flush=True)


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
    """Starts a shell that runs `script` in `folder` once its `stdin` is closed, or this process has ended in any way.

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


# ---- rank variables


AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""Set to True where the rendezvous store exists before rank 0, which else opens it."""
RESTARTS = "TORCHELASTIC_RESTART_COUNT"
"""Number of restarts of the ranks."""
LAUNCHER = "ROLL_BATCHING_LAUNCHER"
"""Process id of our own launcher, in the processes that it starts."""
FAILURES = "ROLL_BATCHING_FAILURES"
"""Folder in which ranks leave their errors for our own launcher."""
ROLE_DEVICES = {"actor_infer": "ROLL_BATCHING_SAMPLER_DEVICES", "reference": "ROLL_BATCHING_REFERENCE_DEVICES"}
"""By role: the variable that tells rank 0 the role's devices, in the format of CUDA_VISIBLE_DEVICES."""
_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", LAUNCHER, FAILURES)


def rank_variables(
    rank: int, world_size: int, *, local_rank: int, local_size: int, host: str, port: int
) -> dict[str, str]:
    """The variables of one rank whose rendezvous store answers at `host` and `port` before any rank starts."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(local_size),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        AGENT_STORE: "True",
    }


def without_rank_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` without variables that identify a rank: a child process would take itself for that rank."""
    return {
        name: value for name, value in environment.items() if name not in _RANK and not name.startswith("TORCHELASTIC_")
    }
