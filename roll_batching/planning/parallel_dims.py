"""Sizes of a parallel layout."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

from roll_batching.checked_fields import CheckedFields, Count
from roll_batching.errors import LayoutError


@dataclass(frozen=True, kw_only=True)
class ParallelDims(CheckedFields, error=LayoutError):
    """Sizes of a parallel layout, as plain integers; compared with `==`.

    A *replica* is the `tp_size * cp_size * pp_size` ranks that compute the same samples; the world consists of
    `dp_size` replicas. Raises `LayoutError` for impossible sizes.
    """

    dp_size: Count = 1
    """Data-parallel ranks, each a replica of TP x CP x PP processes."""
    tp_size: Count = 1
    cp_size: Count = 1
    pp_size: Count = 1
    vpp_size: Count = 1
    """Model chunks per pipeline stage; above 1 the schedule is Megatron's interleaved one."""
    ep_size: Count = 1
    """Expert parallelism: Megatron's expert groups are consecutive ranks of TP x CP x DP."""
    etp_size: Count = None  # type: ignore[assignment]  # an int once constructed
    """Tensor parallelism of the experts. Default: `tp_size`, as in Megatron."""
    sequence_parallel: bool = False
    fully_sharded: bool = False
    """Whether DP ranks gather parameters layer by layer (FSDP, ZeRO-3), and so wait for each other at each
    micro-batch."""

    def __post_init__(self) -> None:
        if self.etp_size is None:
            object.__setattr__(self, "etp_size", self.tp_size)
        super().__post_init__()
        if self.vpp_size > 1 and self.pp_size == 1:
            raise LayoutError(f"vpp_size={self.vpp_size} needs pp_size of at least 2; set vpp_size=1")
        ranks = self.dp_size * self.cp_size * self.tp_size
        if ranks % self.expert_ranks:
            same = self.etp_size == self.tp_size
            divisor, product = ("", "") if same else (f" x etp_size={self.etp_size}", " x tp_size")
            raise LayoutError(
                f"ep_size={self.ep_size}{divisor} does not divide dp_size x cp_size{product} = "
                f"{ranks // self.tp_size if same else ranks}: change one of them"
            )

    @classmethod
    def of_world(cls, world_size: int, **sizes: Any) -> ParallelDims:
        """Sizes for `world_size` processes; `dp_size` follows from the other `sizes`.

        Raises `LayoutError` when the processes cannot be divided into replicas.
        """
        replica = cls(**(sizes | {"ep_size": 1, "etp_size": None}))
        size = replica.replica_size
        if world_size < 1 or world_size % size:
            raise LayoutError(
                f"{world_size} processes cannot be divided into replicas of {size} (tensor {replica.tp_size} x "
                f"pipeline {replica.pp_size} x context {replica.cp_size}): start a multiple of {size} processes or "
                "change the sizes"
            )
        return cls(dp_size=world_size // size, **sizes)

    @property
    def replica_size(self) -> int:
        """Processes of one replica."""
        return self.tp_size * self.cp_size * self.pp_size

    @property
    def world_size(self) -> int:
        """Processes of all replicas."""
        return self.dp_size * self.replica_size

    @property
    def interleaved(self) -> bool:
        """Whether Megatron's interleaved schedule runs, which restricts the number of micro-batches."""
        return self.vpp_size > 1

    @property
    def expert_ranks(self) -> int:
        """Ranks of TP x CP x DP that exchange tokens at every layer with experts."""
        return self.ep_size * self.etp_size

    @property
    def meeting_ranks(self) -> int:
        """Number of consecutive DP ranks that wait for each other at every micro-batch.

        1: ranks wait for each other once per step. `dp_size`: all ranks, where parameters are gathered layer by layer.
        In between: the DP ranks of one Megatron expert group (order "tp-cp-ep-dp"), and those connected to them through
        the TP and CP groups of its ranks.
        """
        if self.fully_sharded:
            return self.dp_size
        ranks = self.tp_size * self.cp_size
        return math.lcm(self.expert_ranks, ranks) // ranks

    @property
    def dims(self) -> ParallelDims:
        """These sizes without the fields of a subclass."""
        return ParallelDims(**{field.name: getattr(self, field.name) for field in fields(ParallelDims)})

    def to_dict(self) -> dict[str, int | bool]:
        """Plain values by field name; `ParallelDims(**values)` restores them."""
        return asdict(self.dims)

    def __str__(self) -> str:
        """Sizes other than 1, such as `dp 4 x tp 2, sequence parallel`."""
        sizes = [f"{name.removesuffix('_size')} {getattr(self, name)}" for name in _SIZES[:-1]]
        shown = [text for text in sizes if not text.endswith(" 1")]
        if self.etp_size != self.tp_size:
            shown.append(f"etp {self.etp_size}")
        parts = [" x ".join(shown) or "one rank"]
        parts += [name.replace("_", " ") for name in ("sequence_parallel", "fully_sharded") if getattr(self, name)]
        return ", ".join(parts)


_SIZES = ("dp_size", "tp_size", "cp_size", "pp_size", "vpp_size", "ep_size", "etp_size")
