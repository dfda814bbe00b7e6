"""Starts a process that works for this one, with a connection to it; it ends when this one does."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection

_CHILD = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from {module} import serve; serve(*map(int, sys.argv[2:]))"
)


def start_child(
    module: str, *numbers: int, environment: Mapping[str, str] | None = None
) -> tuple[subprocess.Popen[bytes], Connection]:
    """Runs `serve(descriptor, parent, *numbers)` of `module` in a new interpreter and process group.

    `environment` None is this process's own.
    """
    ours, theirs = multiprocessing.Pipe()
    # Handed down as it is, since the package need not be installed for an interpreter that starts anew.
    arguments = [json.dumps(sys.path), *map(str, (theirs.fileno(), os.getpid(), *numbers))]
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", _CHILD.format(module=module), *arguments],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        process_group=0,
        env=None if environment is None else dict(environment),
    )
    theirs.close()
    return process, ours


def how_it_ended(code: int) -> str:
    """In words, of an exit code of `subprocess`."""
    return f"by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"with exit code {code}"
