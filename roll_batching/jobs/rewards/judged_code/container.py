"""Containers of judged code. One belongs to its runtime and not to the client that asked for it: it outlives that one.

So each has a name, and somebody who removes it: a shell that waits for the end of its input, which comes when this
process says so, and when this process ends, however that was.
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
    """Whether the command `run` makes a container by one of `RUNTIMES`."""
    return bool(run) and Path(run[0]).name in RUNTIMES and list(run[1:2]) == ["run"]


def names_container(run: Sequence[str]) -> bool:
    """Whether it gives that a name itself."""
    return runs_container(run) and any(word == "--name" or word.startswith("--name=") for word in run)


class Contained:
    """The command `run`, called once: `words` begin its command line. Any other than of `RUNTIMES` is as it was."""

    def __init__(self, run: Sequence[str]) -> None:
        self.words = list(run)
        self._remover: subprocess.Popen[bytes] | None = None
        if runs_container(run):
            self._name = f"roll-batching-{secrets.token_hex(8)}"
            self.words[1:2] = ["run", "--name", self._name]
            self._remover = start_cleanup('exec "$@"', run[0], "rm", "--force", self._name)

    def close(self, *, ended: bool) -> None:
        """The client is gone. `ended`: by itself, and its container with it; else that is removed."""
        if self._remover is None:
            return
        if ended:
            self._remover.kill()
        try:
            self._remover.communicate(timeout=_SECONDS_TO_REMOVE)
        except subprocess.TimeoutExpired:
            print(f"notice: the container {self._name} is still being removed", file=sys.stderr, flush=True)
