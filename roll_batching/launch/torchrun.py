"""Starts the processes of a job on this machine through torch's elastic launcher (what torchrun runs)."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence

from roll_batching.launch.failures import FOLDER_VARIABLE, first_failure


def under_torchrun(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is a worker that torchrun (or another launcher) started."""
    return "RANK" in environment and "WORLD_SIZE" in environment


def launch(module: str, arguments: Sequence[str], count: int, variables: Mapping[str, str]) -> str | None:
    """Runs `python -m module arguments...` as `count` ranks and waits for them.

    `variables` are added to the workers' environment, before their interpreters start. Returns None when all
    ranks succeed, else one message about the first that failed; the others are ended within seconds.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    threads = max(1, (os.cpu_count() or 1) // count)
    with tempfile.TemporaryDirectory(prefix="roll-batching-") as folder:
        os.environ.update({"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)), **variables})
        os.environ[FOLDER_VARIABLE] = folder
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=count,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            # The host's own name may not resolve on laptops and in containers.
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
            max_restarts=0,
            monitor_interval=0.2,
        )
        try:
            elastic_launch(config, sys.executable)("-u", "-m", module, *arguments)
        except ChildFailedError as error:
            # A rank that a signal ended could say nothing; the others then complain about a lost connection.
            for rank, failure in sorted(error.failures.items()):
                if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:
                    return f"rank {rank} {_how(failure.exitcode)} without a message; its output is above"
            said = first_failure(folder)
            if said is not None:
                return f"rank {said.rank} failed: {said.message}"
            rank, failure = error.get_first_failure()
            return f"rank {rank} {_how(failure.exitcode)} without a message; its output is above"
        except SignalException as stopped:
            return f"stopped by {stopped.sigval.name}; all ranks were ended"
        finally:
            del os.environ[FOLDER_VARIABLE]
    return None


def _how(exitcode: int) -> str:
    if exitcode < 0:
        return f"was ended by signal {-exitcode} ({signal.Signals(-exitcode).name})"
    return f"ended with exit code {exitcode}"
