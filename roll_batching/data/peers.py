"""The ranks that data move between, and how they agree before anything moves.

Who moves data first agrees: every rank, also one that has failed, enters one small all-gather. Only when
somebody failed, or the ranks differ, are words exchanged, and then all ranks raise the same error.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from roll_batching.data.checks import describe_difference
from roll_batching.errors import DataError, RankError

T = TypeVar("T")
_DIGEST_WORDS = 4


@dataclass(frozen=True)
class Peers:
    """The data-parallel group, seen from this rank."""

    group: Any
    """A `torch.distributed` group, or None for a single process."""

    rank: int
    """This rank's place in the group."""

    size: int
    """Ranks in the group."""

    device: torch.device
    """Where the group's backend wants small tensors."""

    @classmethod
    def of(cls, group: Any = None) -> Peers:
        """The peers in `group`.

        None stands for Megatron's data-parallel group (without context parallelism) where Megatron is
        initialised, else for all processes of `torch.distributed`, else for this process alone.
        """
        if not (dist.is_available() and dist.is_initialized()):
            if group is not None:
                raise DataError("A process group was given, but torch.distributed is not initialised.")
            return cls(None, 0, 1, torch.device("cpu"))
        if group is None:
            group = _megatron_group() or dist.group.WORLD
        rank = dist.get_rank(group)
        if rank < 0:
            raise DataError(f"Process {dist.get_rank()} is not in the group that data are to move in.")
        return cls(group, rank, dist.get_world_size(group), _device_for(group, torch.device("cpu")))

    def device_for(self, values: Tensor) -> torch.device:
        """Where `values` must be to travel in this group: where they are if the backend can, else nearby."""
        return values.device if self.group is None else _device_for(self.group, values.device)

    def all_gather(self, values: Tensor) -> Tensor:
        """`[size, *values.shape]` on the host, from `values` of the same shape and dtype on every rank."""
        if self.size == 1:
            return values[None].cpu()
        mine = values.to(self.device).contiguous()
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(everyone, mine, group=self.group)
        return torch.stack(everyone).cpu()


def agree(peers: Peers, what: str, prepare: Callable[[], tuple[Mapping[str, str], int, T]]) -> tuple[Tensor, T]:
    """Run `prepare` on every rank, and go on only where all succeed and report the same facts.

    Args:
        peers: who has to agree.
        what: names the operation in errors.
        prepare: returns facts that must be equal on all ranks (label to words), an integer that all ranks
            get to see, and a result for this rank alone. What it raises becomes everybody's error.

    Returns:
        The integers of all ranks, int64 `[size]` on the host, and this rank's result.

    Raises:
        RankError: on all ranks, with the same message, when any of them failed or their facts differ; in a
            single process, `prepare`'s own error.
    """
    if peers.size == 1:
        _, number, result = prepare()
        return torch.tensor([number]), result
    facts: Mapping[str, str] = {}
    number, outcome, error = 0, None, None
    try:
        facts, number, outcome = prepare()
    except Exception as caught:  # the other ranks must hear of any failure, or they wait for ever
        error = caught
    headers = peers.all_gather(torch.tensor([error is None, number, *_digest(facts)], dtype=torch.int64))
    if not (headers[:, 0].all() and (headers[:, 2:] == headers[0, 2:]).all()):
        words: list[Any] = [None] * peers.size
        message = None if error is None else f"{type(error).__name__}: {error}"
        dist.all_gather_object(words, (message, dict(facts)), group=peers.group)
        raise RankError(_explain(what, words)) from error
    return headers[:, 1], cast(T, outcome)


def _explain(what: str, words: Sequence[tuple[str | None, dict[str, str]]]) -> str:
    alike: dict[str, list[int]] = {}
    for rank, (error, _) in enumerate(words):
        if error:
            alike.setdefault(error, []).append(rank)
    if alike:
        return f"{what}: " + "\n".join(f"data-parallel {_ranks(who)}: {text}" for text, who in alike.items())
    first = words[0][1]
    for rank, (_, facts) in enumerate(words):
        if difference := describe_difference(first, facts):
            alike.setdefault(difference, []).append(rank)
    return f"{what}: " + "\n".join(
        f"data-parallel rank 0 (here) and {_ranks(who)} (there) differ: {text}" for text, who in alike.items()
    )


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def _digest(facts: Mapping[str, str]) -> list[int]:
    raw = hashlib.sha256(repr(sorted(facts.items())).encode()).digest()
    return [int.from_bytes(raw[8 * i : 8 * i + 8], "little", signed=True) for i in range(_DIGEST_WORDS)]


def _megatron_group() -> Any:
    state = sys.modules.get("megatron.core.parallel_state")
    if state is None or not state.model_parallel_is_initialized():
        return None
    return state.get_data_parallel_group()


def _device_for(group: Any, preferred: torch.device) -> torch.device:
    backends = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
    # Gloo lists CUDA among its devices, but has no all-to-all there.
    usable = {device for device, backend in backends.items() if device == "cpu" or backend != "gloo"}
    if preferred.type in usable:
        return preferred
    if "cpu" in usable:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
