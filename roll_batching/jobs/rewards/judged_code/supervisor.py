"""Stand-alone program: runs a command, and then kills all its descendants, in any session.

`python -I -S -c TEXT PARENT COMMAND...`. It is a child subreaper: orphaned descendants become its children. It ends
after the command, on SIGTERM, and when its parent ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time

_SET_PARENT_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36


def main(parent: int, command: list[str]) -> int:
    """Runs `command`; returns its exit code, or 1 if a signal ended it."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)
    if os.getppid() != parent:  # the parent ended before prctl, so no signal will come
        return 1
    supervisor = os.getpid()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setpgid(0, 0)
        prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() == supervisor:
            os.execv(command[0], command)
        os._exit(1)
    for stream in range(2):  # else the reader would not get EOF when the command ends
        os.close(stream)
    try:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        kill_descendants(child)
    return code if code >= 0 else 1


def kill_descendants(group: int) -> None:
    """Kills process group `group`, then every child of this process until none is left.

    This process is a child subreaper: descendants that lose their parent become its children, so all are reached.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
    while True:
        for pid in _children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            ended = os.waitpid(-1, os.WNOHANG)[0]
        except ChildProcessError:
            return
        if not ended:
            time.sleep(0.005)


def _children() -> list[int]:
    """Ids of the processes whose parent is this one."""
    parent, children = os.getpid(), []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                with open(f"/proc/{name}/stat", "rb") as file:
                    # "PID (NAME) STATE PARENT ...": split after the last bracket, since a name may have brackets.
                    if int(file.read().rpartition(b")")[2].split()[1]) == parent:
                        children.append(int(name))
    return children


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
