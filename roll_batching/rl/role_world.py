"""The processes of a role that has a world of its own: started together, watched, ended together."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping
from multiprocessing.connection import Connection

from roll_batching.rl.child_process import start_child

DEVICES = {"actor_infer": "ROLL_BATCHING_SAMPLER_DEVICES", "reference": "ROLL_BATCHING_REFERENCE_DEVICES"}
"""By role: the variable by which rank 0 hears which devices are the role's, as CUDA_VISIBLE_DEVICES has them."""
_LAUNCHED = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "ROLL_BATCHING_FAILURES", "ROLL_BATCHING_LAUNCHER")
"""Variables that say which rank of the job a process is: these are none."""


class RoleWorld:
    """`count` new interpreters that run `serve` of `module`, as torchrun would start them as the ranks of one world.

    They meet at a store that lives here, and none outlives this process. `environment` is this process's own, changed
    as the role needs it.
    """

    def __init__(self, module: str, count: int, environment: Mapping[str, str]) -> None:
        from torch.distributed import TCPStore

        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        shared = {name: value for name, value in environment.items() if name not in _LAUNCHED}
        shared |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._store.port)}
        self._processes: list[subprocess.Popen[bytes]] = []
        self.connections: list[Connection] = []
        """To each process, by rank."""
        for rank in range(count):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            process, connection = start_child(module, environment=shared | place)
            self._processes.append(process)
            self.connections.append(connection)

    @property
    def pids(self) -> list[int]:
        """Of the processes, by rank."""
        return [process.pid for process in self._processes]

    def ended(self) -> dict[int, int]:
        """Exit codes of the processes that have ended, by rank; negative for a signal."""
        codes = {rank: process.poll() for rank, process in enumerate(self._processes)}
        return {rank: code for rank, code in codes.items() if code is not None}

    def end(self) -> None:
        """Ends all processes, with their groups. Connections stay open, and say nothing more."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes:
            process.wait()
