"""Environment variables that tell a process its rank, with torchrun's names, and ours."""

from __future__ import annotations

from collections.abc import Mapping

AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""Set to True where the rendezvous store exists before rank 0, which else opens it."""
RESTARTS = "TORCHELASTIC_RESTART_COUNT"
"""Number of restarts of the ranks."""
LAUNCHER = "ROLL_BATCHING_LAUNCHER"
"""Process id of our own launcher, in the processes that it starts."""
FAILURES = "ROLL_BATCHING_FAILURES"
"""Folder in which ranks leave their errors for our own launcher."""
ROLE_DEVICES = {"actor_infer": "ROLL_BATCHING_SAMPLER_DEVICES", "reference": "ROLL_BATCHING_REFERENCE_DEVICES"}
"""By role: the variable that tells rank 0 the role's devices, in the format of CUDA_VISIBLE_DEVICES."""
_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", LAUNCHER, FAILURES)


def rank_variables(
    rank: int, world_size: int, *, local_rank: int, local_size: int, host: str, port: int
) -> dict[str, str]:
    """The variables of one rank whose rendezvous store answers at `host` and `port` before any rank starts."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(local_size),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        AGENT_STORE: "True",
    }


def without_rank_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` without variables that identify a rank: a child process would take itself for that rank."""
    return {
        name: value for name, value in environment.items() if name not in _RANK and not name.startswith("TORCHELASTIC_")
    }
