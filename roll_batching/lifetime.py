"""No process outlives the one that it works for, however that one ended."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import NoReturn

_SET_PARENT_DEATH_SIGNAL = 1
"""`PR_SET_PDEATHSIG` of prctl(2)."""
_SECONDS_BETWEEN_LOOKS = 0.5


def die_with_parent(parent: int) -> None:
    """From now on the kernel kills this process when `parent`, which started it, ends. Linux only."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before the kernel knew
        os._exit(1)


def forks_die_with_us() -> None:
    """Processes that this one's main thread forks end with it: a checkpoint's writers, the loaders of data.

    The kernel looks at the thread that forked. Those of other threads may live longer than their thread does.
    """
    forker = 0

    def before() -> None:
        nonlocal forker
        forker = os.getpid() if threading.current_thread() is threading.main_thread() else 0

    def after() -> None:
        if forker:
            die_with_parent(forker)

    os.register_at_fork(before=before, after_in_child=after)


def end_with_parent(parent: int) -> None:
    """This process and all of its session end within a second after `parent` has ended.

    A thread watches, so that what this process has started can be ended first: the kernel's signal would leave no
    time for it. Where the session is not this process's own, as in a shell, only the process itself ends.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        _end_here()

    threading.Thread(target=watch, name="parent", daemon=True).start()


def _end_here() -> NoReturn:
    if os.getsid(0) == os.getpid():
        end_session(os.getpid())
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("killed")


def end_session(session: int) -> None:
    """Kills every process of `session` other than this one."""
    import psutil

    living = True
    while living:  # again, for what was forked meanwhile
        living = False
        for pid in psutil.pids():
            with contextlib.suppress(ProcessLookupError, PermissionError, psutil.NoSuchProcess):
                if pid == os.getpid() or os.getsid(pid) != session:
                    continue
                if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                    continue
                os.kill(pid, signal.SIGKILL)
                living = True


def run_under(parent: int, command: Sequence[str]) -> NoReturn:
    """Runs `command` until it or `parent`, which started this process in a session of its own, has ended.

    Then everything in this session is killed, and this process ends with the command's exit code. SIGTERM is for the
    command: this process stays until it has followed.
    """
    signal.signal(signal.SIGTERM, lambda *_: None)  # a handler of ours, not SIG_IGN, which the command would inherit
    own = os.getpid()
    program = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=lambda: die_with_parent(own))
    while program.poll() is None and os.getppid() == parent:
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    end_session(own)
    code = program.poll()
    os._exit(1 if code is None else code if code >= 0 else 128 - code)
