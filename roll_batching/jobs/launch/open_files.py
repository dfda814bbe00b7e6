"""Raises the limit of open files, or refuses a limit that is too low."""

from __future__ import annotations

import contextlib
import resource

from roll_batching.errors import RollBatchingError

NEEDED = 256
"""Two ranks open 125 each, four 152: sockets between ranks in several groups, pipes, files."""
_WANTED = 65_536


def raise_open_files_limit() -> None:
    """Raises this process's limit, which its children inherit. Raises RollBatchingError when it stays too low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = hard == resource.RLIM_INFINITY
    wanted = _WANTED if unlimited else min(hard, _WANTED)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    if soft != resource.RLIM_INFINITY and soft < NEEDED:
        raise RollBatchingError(
            f"ulimit -n is {soft}: a process here may open {soft} files and sockets, and each of a job's processes "
            f"needs {NEEDED} or more. Raise it (ulimit -n 4096; its hard limit, ulimit -Hn, may need an administrator)"
        )
