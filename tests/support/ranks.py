"""Run a test function on several real processes, one per rank, and bring the results home.

    def gather(payload):                       # in tests/samples/test_x.py
        dist.init_process_group("gloo")        # the function itself opens the group it wants
        return dist.get_rank() + payload

    assert run_ranks(2, "tests.samples.test_x:gather", payload=10) == [10, 11]

The function takes the payload as its only argument. It finds RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE,
MASTER_ADDR and MASTER_PORT in the environment, as under torchrun, and one OpenMP thread. On Linux without a
GPU the ranks are forked from a process that has imported torch and Megatron already (`fork_server.py`).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.fork_server import ForkedProcess, ForkServer

Process = ForkedProcess | subprocess.Popen[bytes]
ROOT = Path(__file__).resolve().parents[2]


class RankOutcome(NamedTuple):
    """How one rank ended: exit code (negative: killed by that signal), all it printed, what it returned."""

    returncode: int
    output: str
    result: Any


class RanksFailed(AssertionError):
    """At least one rank failed or ran out of time; the message holds every rank's output."""


def run_ranks(
    world_size: int,
    target: str,
    payload: Any = None,
    timeout: float = 180,
    check: bool = True,
    grace: float = 10,
    env: dict[str, str] | None = None,
    fresh: bool = False,
) -> list[Any]:
    """Call `module:function(payload)` on `world_size` processes at once.

    Returns the results by rank. When a rank fails, the others get `grace` seconds to end by themselves and
    are then killed; after `timeout` seconds all are. With `check`, any failure raises `RanksFailed`; without,
    the return value is a list of `RankOutcome`. `env` adds environment variables. With `fresh`
    every rank is a new interpreter: for what libraries read once, when they are imported.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        home = Path(folder)
        (home / "payload").write_bytes(pickle.dumps(payload))
        port = _free_port()
        start = _spawn if fresh or not _CAN_FORK else _fork
        processes = [
            start(home, target, rank, dict(_rank_env(rank, world_size, port), RANKS_FOLDER=str(home), **(env or {})))
            for rank in range(world_size)
        ]
        try:
            late = _wait(processes, timeout, grace)
        finally:
            for process in processes:
                kill_process(process)
        outcomes = [_outcome(home, rank, process.returncode) for rank, process in enumerate(processes)]
    if not check:
        return outcomes
    if late or any(o.returncode != 0 for o in outcomes):
        head = f"{target} on {world_size} ranks: " + (f"not done after {timeout:g} s" if late else "failed")
        raise RanksFailed("\n".join([head, *(_shown(r, o) for r, o in enumerate(outcomes))]))
    return [o.result for o in outcomes]


def meet(name: int | str) -> None:
    """Opens a process group of a run's ranks; `name` is new in the run.

    The file by which they find each other is the run's own: in one that an earlier run has left, ranks read the
    addresses of processes that are gone. Ports do not tell runs apart, as they are given out again.
    """
    import torch.distributed as dist

    file = Path(os.environ["RANKS_FOLDER"]) / f"met-{name}"
    dist.init_process_group(
        "gloo", init_method=f"file://{file}", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"])
    )


def part() -> None:
    """Ends all groups of this process, for the next `meet`: each has its threads, and many layouts have thousands."""
    import gc

    import torch.distributed as dist
    from megatron.core import parallel_state

    dist.barrier()
    gc.collect()  # the strategy, which refers to itself, and to its groups
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def start_process(home: Path, target: str, payload: Any) -> Process:
    """Call `module:function(payload)` in a process, which goes on; `home / "output0"` gets what it prints."""
    (home / "payload").write_bytes(pickle.dumps(payload))
    (home / "output0").touch()
    return (_fork if _CAN_FORK else _spawn)(home, target, 0, {})


def _free_port() -> int:
    """A port that nobody takes before the ranks do.

    It lies below those that systems hand out, and in a stretch of this process of tests where several run side by side.
    Runs of pytest that do not know of each other draw from the same stretch: each draw is a new one, as two that count
    on from near numbers would follow each other's ports.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    while True:
        port = 12_000 + 1_000 * (worker % 16) + random.SystemRandom().randrange(1_000)
        with contextlib.suppress(OSError), socket.socket() as s:
            s.bind(("127.0.0.1", port))
            return port


def _rank_env(rank: int, world_size: int, port: int) -> dict[str, str]:
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
    }


def _base_env() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return dict(os.environ, OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1", PYTHONPATH=path)


def _spawn(home: Path, target: str, rank: int, env: dict[str, str]) -> subprocess.Popen[bytes]:
    with open(home / f"output{rank}", "wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.support.ranks", target, str(home), str(rank)],
            cwd=ROOT,
            env=_base_env() | env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a rank's own children die with it
        )


# A forked process cannot use CUDA once its parent has looked at it.
_CAN_FORK = sys.platform == "linux" and not os.path.exists("/dev/nvidiactl")


@functools.cache
def _server() -> ForkServer:
    return ForkServer(str(ROOT), _base_env())


def _fork(home: Path, target: str, rank: int, env: dict[str, str]) -> ForkedProcess:
    return _server().start((target, str(home), str(rank)), env, str(home / f"output{rank}"))


def _wait(processes: list[Process], timeout: float, grace: float) -> bool:
    """True when the time ran out before every rank ended and none had failed."""
    end = time.monotonic() + timeout
    failed_at = None
    while True:
        codes = [p.poll() for p in processes]
        if all(c is not None for c in codes):
            return False
        now = time.monotonic()
        if failed_at is None and any(c not in (None, 0) for c in codes):
            failed_at = now
        if failed_at is not None and now > failed_at + grace:
            return False
        if now > end:
            return failed_at is None
        time.sleep(0.01)


def kill_process(process: Process) -> None:
    """Kill it and what it forked, which lives on in its group after it has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _outcome(home: Path, rank: int, returncode: int) -> RankOutcome:
    output = (home / f"output{rank}").read_text(errors="replace")
    file = home / f"result{rank}"
    return RankOutcome(returncode, output, pickle.loads(file.read_bytes()) if file.exists() else None)


def _shown(rank: int, outcome: RankOutcome) -> str:
    return f"--- rank {rank}, exit code {outcome.returncode} ---\n{outcome.output.rstrip()[-6000:]}"


def _child(target: str, folder: str, rank: str) -> None:
    module, function = target.split(":")
    home = Path(folder)
    payload = pickle.loads((home / "payload").read_bytes())
    result = getattr(importlib.import_module(module), function)(payload)
    part = home / f"result{rank}.part"
    part.write_bytes(pickle.dumps(result))
    part.rename(home / f"result{rank}")


if __name__ == "__main__":
    _child(*sys.argv[1:])
