"""Containers of the model's code. A container belongs to its runtime, and outlives the client that started it.

So each gets a name, and a cleanup shell that removes it when we close the shell's input or this process ends.
"""

from __future__ import annotations

import secrets
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from roll_batching.jobs.processes.child_process import start_cleanup

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
    """The command `run` for one call, with a container name if it is of `RUNTIMES`; `arguments` start with it."""

    def __init__(self, run: Sequence[str]) -> None:
        self.arguments = list(run)
        self._cleanup: subprocess.Popen[bytes] | None = None
        if runs_container(run):
            self._name = f"roll-batching-{secrets.token_hex(8)}"
            self.arguments[1:2] = ["run", "--name", self._name]
            self._cleanup = start_cleanup('exec "$@"', run[0], "rm", "--force", self._name)

    def close(self, *, exited: bool) -> None:
        """Removes the container after its client has ended. `exited`: it exited itself, and needs no removal."""
        if self._cleanup is None:
            return
        if exited:
            self._cleanup.kill()
        try:
            self._cleanup.communicate(timeout=_SECONDS_TO_REMOVE)
        except subprocess.TimeoutExpired:
            print(f"notice: the container {self._name} is still being removed", file=sys.stderr, flush=True)
