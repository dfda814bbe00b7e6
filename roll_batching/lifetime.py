"""Ends child processes with their parent, however the parent ends."""

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
_POLL_SECONDS = 0.5


def die_with_parent(parent: int) -> None:
    """Has the kernel kill this process when its parent, the process `parent`, ends. Linux only."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the call above
        os._exit(1)


def forks_die_with_us() -> None:
    """Ends processes that the main thread forks (checkpoint writers, data loaders) with this process.

    The kernel's signal follows the forking thread, not the process: children of other threads are left alone, as they
    may outlive their thread.
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
    """Ends this process and its session within a second after `parent` has ended.

    A thread polls, so that children can be ended first: the kernel's signal would leave no time for that. If another
    process leads the session, such as a shell, only this process ends.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_POLL_SECONDS)
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

    alive = True
    while alive:  # again, for processes that were forked meanwhile
        alive = False
        for pid in psutil.pids():
            with contextlib.suppress(ProcessLookupError, PermissionError, psutil.NoSuchProcess):
                if pid == os.getpid() or os.getsid(pid) != session:
                    continue
                if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                    continue
                os.kill(pid, signal.SIGKILL)
                alive = True


def run_under(parent: int, command: Sequence[str]) -> NoReturn:
    """Runs `command` until it ends or `parent`, which started this process in a new session, ends.

    Then kills all processes of the session and exits with the command's exit code. SIGTERM is ignored here, so that the
    command can end first.
    """
    signal.signal(signal.SIGTERM, lambda *_: None)  # a handler: the command would inherit SIG_IGN
    session = os.getpid()
    program = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=lambda: die_with_parent(session))
    while program.poll() is None and os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
    end_session(session)
    code = program.poll()
    os._exit(1 if code is None else code if code >= 0 else 128 - code)
