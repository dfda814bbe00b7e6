"""Constraints of a plan: sizes of a parallel layout, and how samples are batched."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

import numpy as np

from roll_batching.checked_fields import LARGEST, CheckedFields, Count
from roll_batching.errors import LayoutError, PlanError
from roll_batching.planning.arrays import Ints, round_up
from roll_batching.planning.batching_spec import BatchingSpec

SMALLEST_SLICE = 2048
"""Fewest tokens of a rank in a slice of "auto". With fewer, an H100 writes a weight's gradient longer than it computes
it: t tokens are t / 4 FLOPs per byte of fp32 gradient, and the device does 295."""


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


@dataclass(frozen=True, kw_only=True)
class PlanConstraints(BatchingSpec, ParallelDims):
    """Constraints of one plan; checked at construction.

    Takes all keywords of `ParallelDims` and of `BatchingSpec`; `dims` and `batching` return the two. Raises `PlanError`
    for values that no plan can satisfy or that the mode does not read.
    """

    dp_size: Count
    """Data-parallel ranks, each a replica of TP x CP x PP processes."""

    cap_counts_shared: bool = False
    """Whether the cap counts tokens that samples share for each of them, as where a head computes whole samples."""
    group_size: Count | Literal["auto"] | None = None
    """Interleaving only: Megatron's `microbatch_group_size_per_vp_stage`. None: `pp_size`, and the number of
    micro-batches (K) is a multiple of it. An integer N admits K with K % N == 0 or K % N >= pp_size. "auto" admits each
    K >= pp_size, and the plan has the smallest N that Megatron accepts for it."""

    pipeline_slices: Count | Literal["auto"] = 1
    """Slices into which a pack of mean cost is cut along the sequence; a slice is then the unit of the pipeline's
    schedule. 1: whole packs. "auto": the number with the shortest predicted step, if it is shorter than Megatron's
    schedule of whole packs."""

    smallest_slice: Count = SMALLEST_SLICE
    """Tokens of one context-parallel rank that a slice of mean cost has at least under `pipeline_slices` "auto"."""

    num_micro_batches_multiple: Count = 1
    """The number of micro-batches per rank is a multiple of this, in addition to what the layout requires."""

    fillers: bool = True
    """Whether a filler may take the place of an empty micro-batch; False: a plan that needs one is an error."""

    pack_multiple: Count = 1
    """Alignment of the tokens that one rank holds, by precision: 1 in bf16 and fp32, 16 in FP8."""

    max_cp_size: Count = 1
    """Largest context-parallel size of a pack. Above 1 each pack has its own size, a power of two, and is computed by
    an aligned block of consecutive ranks: `dp_size` then counts all DP x CP ranks, `cp_size` is 1, `max_tokens` is the
    cap on the tokens of one rank."""

    def __post_init__(self) -> None:
        try:
            super().__post_init__()
        except LayoutError as error:
            raise PlanError(str(error)) from None
        if self.group_size is not None and self.vpp_size == 1:
            raise PlanError(f"group_size={self.group_size!r} is read only with vpp_size > 1; leave it None")
        if isinstance(self.group_size, int) and self.group_size < self.pp_size:
            raise PlanError(
                f"group_size={self.group_size} is below pp_size={self.pp_size}; Megatron's interleaved "
                f"schedule needs at least {self.pp_size}"
            )
        if self.has_cp_per_pack:
            self._check_cp_per_pack()
        self._check_slices()
        if self.rectangle_alignment > LARGEST:
            raise PlanError(
                f"sequence_length_round={self.sequence_length_round}, sequence_multiple={self.sequence_multiple}, "
                f"pack_multiple={self.pack_multiple} and the layout together align to {self.rectangle_alignment} "
                "tokens, more than 2^40: set one of them lower"
            )
        no_filler = self.has_cp_per_pack and self.usable_tokens_of(1) < self.micro_batch_alignment
        if self.max_tokens is not None and (self.usable_tokens < 1 or no_filler):
            raise PlanError(
                f"max_tokens={self.max_tokens} is below the alignment of one micro-batch "
                f"({self.micro_batch_alignment} tokens for this layout); raise the cap"
            )

    @classmethod
    def of(cls, dims: ParallelDims, batching: BatchingSpec, **further: Any) -> PlanConstraints:
        """Constraints from a layout and batching settings; `further` are fields that neither of them has."""
        sizes = {field.name: getattr(dims, field.name) for field in fields(ParallelDims)}
        return cls(**sizes, **{field.name: getattr(batching, field.name) for field in fields(BatchingSpec)}, **further)

    def _check_slices(self) -> None:
        wanted = {"mode": "packed", "vpp_size": 1, "max_cp_size": 1, "shared_shapes": False}
        must = f"pipeline_slices={self.pipeline_slices}" if self.pipeline_slices not in (1, "auto") else ""
        must = 'oversize="slice"' if self.oversize == "slice" else must
        if self.oversize == "slice" and self.joint_ranks > 1:
            raise PlanError(
                f"{must} cuts long packs into more slices than others, and here {self.joint_ranks} ranks wait for each "
                'other at every slice (experts, or objective="lockstep"): choose "alone", "truncate" or "drop"'
            )
        for name, value in wanted.items():
            if must and getattr(self, name) != value:
                raise PlanError(
                    f"{must} cuts packs into slices, which needs {name}={value!r} instead of {getattr(self, name)!r}: "
                    f"set it, or leave {must.split('=')[0]} out"
                )

    @property
    def without_slices(self) -> PlanConstraints:
        """These constraints for plans of whole packs."""
        return replace(self, pipeline_slices=1, oversize="alone" if self.oversize == "slice" else self.oversize)

    @property
    def cuts_packs(self) -> bool:
        """Whether plans look for slices of packs."""
        if self.oversize == "slice":
            return True
        if self.pipeline_slices != "auto":
            return self.pipeline_slices > 1
        return (
            self.pp_size > 1
            and self.mode == "packed"
            and not (self.interleaved or self.has_cp_per_pack or self.shared_shapes)
        )

    def _check_cp_per_pack(self) -> None:
        size = self.max_cp_size
        if size & (size - 1) or self.dp_size % size:
            raise PlanError(
                f"max_cp_size={size} must be a power of two that divides dp_size={self.dp_size}, which counts all "
                "data- and context-parallel ranks"
            )
        if self.exceeds_cap:
            raise PlanError(
                f'oversize="{self.oversize}" is not available with max_cp_size={size}: more ranks compute longer '
                "sequences. Raise max_cp_size or max_tokens, or set oversize to truncate or drop"
            )
        wanted = {
            "cp_size": 1,
            "mode": "packed",
            "pack_shapes": None,
            "algorithm": "load_balance",
            "shared_shapes": False,
            "min_num_micro_batches": 1,
            "num_micro_batches_multiple": 1,
            "fillers": True,
        }
        for name, value in wanted.items():
            if getattr(self, name) != value:
                raise PlanError(
                    f"max_cp_size={size} gives each pack its own context-parallel size, which needs {name}={value!r} "
                    f"instead of {getattr(self, name)!r}: set it, or leave max_cp_size out"
                )

    @property
    def has_cp_per_pack(self) -> bool:
        """Whether each pack has its own context-parallel size."""
        return self.max_cp_size > 1

    @property
    def legal_cp_sizes(self) -> tuple[int, ...]:
        """Context-parallel sizes that a pack may have, ascending."""
        if not self.has_cp_per_pack:
            return (self.cp_size,)
        return tuple(1 << exponent for exponent in range(self.max_cp_size.bit_length()))

    @property
    def largest_cp_size(self) -> int:
        """Context-parallel size of the packs with the longest sequences."""
        return self.legal_cp_sizes[-1]

    @property
    def sequence_alignment(self) -> int:
        """`sequence_alignment_of` the layout's context-parallel size."""
        return self.sequence_alignment_of(self.cp_size)

    def sequence_alignment_of(self, cp_size: int) -> int:
        """Multiple of each slot: of 2*cp when cp > 1, and of `sequence_multiple`."""
        layout = 2 * cp_size if cp_size > 1 else 1
        if self.sequence_multiple is None:
            return layout
        if isinstance(self.sequence_multiple, str):
            return math.lcm(layout, 2 * cp_size * self.tp_size)
        return math.lcm(layout, self.sequence_multiple)

    @property
    def pack_alignment(self) -> int:
        """`pack_alignment_of` the layout's context-parallel size."""
        return self.pack_alignment_of(self.cp_size)

    def pack_alignment_of(self, cp_size: int) -> int:
        """Multiple of the tokens of each pack.

        CP divides a pack into 2*cp chunks; precision and sequence parallelism align the share of a rank. `pack_shapes`
        aligns to one of the two lengths next to that share of the cap: that with which a pack holds more.
        """
        unit = self._layout_alignment(cp_size)
        if self.pack_shapes is None or self.max_tokens is None:
            return unit
        unit = math.lcm(unit, self.sequence_alignment_of(cp_size))
        below = max(self.max_tokens // self.pack_shapes // unit, 1) * unit
        return max(below, below + unit, key=self._longest_multiple)

    def _layout_alignment(self, cp_size: int) -> int:
        """`pack_alignment_of` without `pack_shapes`."""
        share = cp_size * self.pack_multiple * (self.tp_size if self.sequence_parallel else 1)
        return math.lcm(2 * cp_size if cp_size > 1 else 1, share)

    def _longest_multiple(self, unit: int) -> int:
        """Tokens of the longest of `pack_shapes` multiples of `unit` under the cap."""
        return min((self.max_tokens or 0) // unit, self.pack_shapes or 0) * unit

    @property
    def rectangle_alignment(self) -> int:
        """Multiple of the row length of a rectangle."""
        layout = self._layout_alignment(self.cp_size)
        return math.lcm(self.sequence_length_round, self.sequence_alignment, layout)

    @property
    def micro_batch_alignment(self) -> int:
        """Tokens of the smallest legal micro-batch, which is a filler."""
        if self.mode == "packed":
            return math.lcm(self.pack_alignment, self.sequence_alignment)
        return self.rectangle_alignment

    @property
    def usable_tokens(self) -> int:
        """Most tokens in the slots of an aligned pack, of the largest size, below `max_tokens`; 0: none fits."""
        usable = self.usable_tokens_of(self.largest_cp_size)
        return usable if usable >= self.micro_batch_alignment else 0

    def usable_tokens_of(self, cp_size: int) -> int:
        """Most tokens of all slots of an aligned pack with this context-parallel size. Needs `max_tokens`."""
        if self.max_tokens is None:
            raise PlanError("usable_tokens needs max_tokens, the cap of a micro-batch, which is None: set it")
        alignment = self.pack_alignment_of(cp_size) if self.mode == "packed" else self.rectangle_alignment
        cap = self.max_tokens * cp_size if self.has_cp_per_pack else self.max_tokens
        return min(cap // alignment, self.pack_shapes or cap) * alignment

    def longest_cut(self, sizes: Ints) -> int:
        """Largest length to truncate samples of `sizes` to, so that a micro-batch holds them together; 0: none."""
        cap, row_limit = None if self.max_tokens is None else self.usable_tokens, self.row_limit
        if self.mode != "packed":
            limits = [] if row_limit is None else [row_limit]
            if cap is not None:
                alignment = self.rectangle_alignment
                limits.append(cap // len(sizes) // alignment * alignment)
                if row_limit is not None and len(sizes) * -(-row_limit // alignment) * alignment > cap:
                    return 0
            return min(limits, default=int(sizes.max()))
        alignment = self.sequence_alignment_of(self.largest_cp_size)
        low, high = 0, self.usable_tokens // alignment
        while low < high:
            middle = (low + high + 1) // 2
            if int(round_up(np.minimum(sizes, middle * alignment), alignment).sum()) <= self.usable_tokens:
                low = middle
            else:
                high = middle - 1
        return low * alignment

    @property
    def lockstep_ranks(self) -> int:
        """Number of consecutive DP ranks that wait for each other at every micro-batch, by objective.

        1: ranks wait for each other once per step. `dp_size`: all ranks, also where they compute the same shapes. Else
        `meeting_ranks` of the layout.
        """
        if self.objective == "rank_total":
            return 1
        if self.objective == "lockstep" or self.shared_shapes:
            return self.dp_size
        return self.meeting_ranks

    @property
    def joint_ranks(self) -> int:
        """Number of consecutive DP ranks that wait for each other at every micro-batch, by the layout or objective."""
        return max(self.lockstep_ranks, self.meeting_ranks)

    @property
    def meets_at_every_index(self) -> bool:
        """Whether ranks wait for each other at every micro-batch, and so need equal numbers of them."""
        return self.joint_ranks > 1

    def to_dict(self) -> dict[str, Any]:
        """Plain values by field name; `PlanConstraints(**values)` restores them."""
        return {field.name: getattr(self, field.name) for field in fields(self)}
