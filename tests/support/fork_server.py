"""A process that has imported torch, Megatron and this package, and forks a test's ranks: each starts in milliseconds.

The parent writes one pickled request per rank to its standard input (`Request`) and gets pickled events back:
("started", number, pid) and ("ended", number, exit code). When the input closes, the server kills what it
started and leaves.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from typing import NamedTuple

PRELOADED = (
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
    "numba",
    "pydantic",
    "rich.progress",
    "torch.utils.tensorboard",
    "torch.distributed",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "megatron.core",
    "megatron.core.models.gpt",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
    "megatron.core.dist_checkpointing",
    "pytest",  # by the modules of tests
    "roll_batching.jobs.job",
    "roll_batching.modeling.builder",
    "roll_batching.planning.load_balance.planner",
    "roll_batching.strategy",
    "tests.support.models",
)
"""Of what nearly every rank needs; importing this package alone would take longer than the rest of most tests."""


class Request(NamedTuple):
    """Start one rank: run `module`'s `_child(*arguments)` in a new session, its output going to a file."""

    number: int
    arguments: tuple[str, ...]
    env: dict[str, str]
    output: str


class ForkedProcess:
    """A rank that the server started; looks like `subprocess.Popen` as far as `ranks.py` needs it."""

    def __init__(self, started: threading.Event) -> None:
        self.pid = 0
        self.returncode: int | None = None
        self.started = started

    def poll(self) -> int | None:
        return self.returncode

    def wait(self) -> int:
        while self.returncode is None:
            time.sleep(0.002)
        return self.returncode


class ForkServer:
    """The parent's end. Started on first use, once per test session."""

    def __init__(self, cwd: str, env: dict[str, str]) -> None:
        self._lock = threading.Lock()
        self._ranks: dict[int, ForkedProcess] = {}
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-m", "tests.support.fork_server"],
            cwd=cwd,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        threading.Thread(target=self._listen, daemon=True).start()

    def start(self, arguments: tuple[str, ...], env: dict[str, str], output: str) -> ForkedProcess:
        """Ask for one rank and wait for its process id."""
        rank = ForkedProcess(threading.Event())
        with self._lock:
            number = len(self._ranks)
            self._ranks[number] = rank
            assert self._process.stdin is not None
            self._process.stdin.write(pickle.dumps(Request(number, arguments, env, output)))
            self._process.stdin.flush()
        if not rank.started.wait(120):
            raise RuntimeError("the fork server does not answer")
        return rank

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(EOFError):
            while True:
                what, number, value = pickle.load(self._process.stdout)
                rank = self._ranks[number]
                if what == "started":
                    rank.pid = value
                    rank.started.set()
                else:
                    rank.returncode = value
        for rank in self._ranks.values():  # the server is gone, and its children with it
            rank.started.set()
            if rank.returncode is None:
                rank.returncode = -signal.SIGKILL


def serve(child: Callable[..., None]) -> None:
    """The server's loop. `child(*arguments)` runs in each forked process."""
    events = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # whatever the imports print must not mix with the events
    requests = os.fdopen(os.dup(0), "rb", buffering=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in PRELOADED:
            with contextlib.suppress(ImportError):
                __import__(name)
        with contextlib.suppress(ImportError):
            import numba

            numba.njit(lambda x: x + 1)(1)  # loads its compiler, which takes seconds; no thread is started
    gc.collect()
    gc.freeze()  # ranks that collect garbage need not walk, and copy, all that was imported
    living: dict[int, int] = {}
    try:
        while True:
            ready, _, _ = select.select([requests], [], [], 0.005 if living else None)
            if ready:
                try:
                    request = Request(*pickle.load(requests))
                except EOFError:
                    return
                pid = os.fork()
                if pid == 0:
                    _become(request, child)
                living[pid] = request.number
                events.write(pickle.dumps(("started", request.number, pid)))
            while living:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                events.write(pickle.dumps(("ended", living.pop(pid), os.waitstatus_to_exitcode(status))))
    finally:
        for pid in living:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


def _become(request: Request, child: Callable[..., None]) -> None:
    """In the forked process: take over the rank's surroundings, run it, and never return."""
    code = 1
    try:
        os.setsid()
        output = os.open(request.output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.update(request.env)
        child(*request.arguments)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    from tests.support.ranks import _child

    serve(_child)
