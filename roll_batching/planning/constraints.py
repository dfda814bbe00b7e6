"""What a plan must respect: the layout it runs on, the cap, the alignment, the algorithm."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from roll_batching.errors import PlanError

MODES = ("packed", "dynamic", "padded")
NEMO_RL_PACKERS = (
    "concatenative",
    "first_fit_decreasing",
    "first_fit_shuffle",
    "modified_first_fit_decreasing",
)
ALGORITHMS = {
    "packed": ("load_balance", "none", *NEMO_RL_PACKERS),
    "dynamic": ("roll", "nemo_rl", "prefer_closest", "prefer_first"),
    "padded": ("none",),
}
OVERSIZE_POLICIES = ("error", "alone", "truncate", "drop")
OBJECTIVES = ("auto", "rank_total", "lockstep", "pipeline")


@dataclass(frozen=True, kw_only=True)
class PlanConstraints:
    """The rules of one plan; checked at construction.

    Raises `PlanError` for values that no plan could satisfy or that the mode would not read.
    """

    dp_size: int
    """Data-parallel ranks, each a replica of TP x CP x PP processes."""

    max_tokens: int | None = None
    """Cap on the tokens that one micro-batch computes, before CP divides it. None only in mode "padded"."""

    mode: str = "packed"
    """"packed" (samples end to end), "dynamic" (rectangles of like lengths) or "padded" (fixed rows)."""

    algorithm: str | None = None
    """How micro-batches are formed; None takes the mode's default: load_balance, roll, none."""

    tp_size: int = 1
    cp_size: int = 1
    sequence_parallel: bool = False
    pp_size: int = 1
    vpp_size: int = 1
    """Model chunks per pipeline stage; above 1 the schedule is Megatron's interleaved one."""

    ep_size: int = 1
    """Expert parallelism: Megatron's expert groups are consecutive ranks of TP x CP x DP."""

    etp_size: int | None = None
    """Tensor parallelism inside the experts; None means `tp_size`, as in Megatron."""

    fully_sharded: bool = False
    """Whether DP ranks gather parameters layer by layer (FSDP, ZeRO-3), and so meet at every micro-batch."""

    group_size: int | str | None = None
    """Interleaving only: Megatron's `microbatch_group_size_per_vp_stage`. None means `pp_size`, with the
    micro-batch count a multiple of it; an int N admits K with K % N == 0 or K % N >= pp_size; "auto" admits
    every K >= pp_size and the plan names the smallest N that Megatron accepts for it."""

    sequence_multiple: int | str | None = None
    """Asked per-sequence alignment beside the layout's own (2*cp when cp > 1): an int, or "2*cp*tp"."""

    pack_multiple: int = 1
    """What the precision asks of the tokens that one rank holds (1 in bf16 and fp32, 16 in FP8)."""

    sequence_length_round: int = 1
    """Modes "dynamic" and "padded": the rectangle's length is a multiple of this."""

    rows: int | None = None
    """Mode "padded": sequences per micro-batch; None takes as many as the cap admits."""

    padded_length: int | None = None
    """The run's fixed maximum. Mode "padded": the length of every row (None: the micro-batch's longest).
    Other modes: only the width that the report compares with (`tokens_before`)."""

    min_num_micro_batches: int = 1
    """Lower bound on the micro-batches of a rank."""

    shared_shapes: bool = False
    """Every rank computes the same shape at the same micro-batch index (the largest of them)."""

    oversize: str = "error"
    """A sequence or group above the cap: "error", "alone" (a micro-batch of its own, above the cap),
    "truncate" or "drop"."""

    objective: str = "auto"
    """What load_balance minimises. "auto" and "pipeline": the step's time by the layout; where ranks meet once per
    step, rank totals within 1.0005 of their mean wherever that is possible, and then lockstep. "lockstep": as if all
    ranks met at every micro-batch; "rank_total": rank totals alone."""

    seed: int = 0
    """Seed of first_fit_shuffle and of the search; the same seed gives the same plan on any machine."""

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise PlanError(f"mode={self.mode!r} is unknown; choose one of {', '.join(MODES)}")
        if self.algorithm is None:
            object.__setattr__(self, "algorithm", ALGORITHMS[self.mode][0])
        if self.algorithm not in ALGORITHMS[self.mode]:
            raise PlanError(
                f"algorithm={self.algorithm!r} does not exist in mode {self.mode!r}; "
                f"choose one of {', '.join(ALGORITHMS[self.mode])}"
            )
        for name in (
            "dp_size",
            "tp_size",
            "cp_size",
            "pp_size",
            "vpp_size",
            "ep_size",
            "pack_multiple",
            "sequence_length_round",
            "min_num_micro_batches",
        ):
            _require_positive(name, getattr(self, name))
        for name in ("max_tokens", "rows", "padded_length", "etp_size"):
            if getattr(self, name) is not None:
                _require_positive(name, getattr(self, name))
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0:
            raise PlanError(f"seed={self.seed!r} must be an integer of at least 0")
        if self.oversize not in OVERSIZE_POLICIES:
            raise PlanError(f"oversize={self.oversize!r} is unknown; choose one of {', '.join(OVERSIZE_POLICIES)}")
        if self.objective not in OBJECTIVES:
            raise PlanError(f"objective={self.objective!r} is unknown; choose one of {', '.join(OBJECTIVES)}")
        if isinstance(self.sequence_multiple, str):
            if self.sequence_multiple != "2*cp*tp":
                raise PlanError(f'sequence_multiple={self.sequence_multiple!r} must be an integer, None or "2*cp*tp"')
        elif self.sequence_multiple is not None:
            _require_positive("sequence_multiple", self.sequence_multiple)
        self._check_experts()
        self._check_pipeline()
        self._check_mode()

    def _check_experts(self) -> None:
        ranks = self.tp_size * self.cp_size * self.dp_size
        if ranks % self._expert_ranks:
            inner = "" if self.etp_size is None else f" x etp_size={self.etp_size}"
            whole = "dp_size x cp_size" if self.etp_size is None else "dp_size x cp_size x tp_size"
            raise PlanError(
                f"ep_size={self.ep_size}{inner} does not divide {whole} = "
                f"{ranks if self.etp_size else ranks // self.tp_size}: change one of them"
            )

    def _check_pipeline(self) -> None:
        if self.vpp_size > 1 and self.pp_size == 1:
            raise PlanError(f"vpp_size={self.vpp_size} needs pp_size of at least 2; set vpp_size=1")
        if self.group_size is None:
            return
        if self.vpp_size == 1:
            raise PlanError(f"group_size={self.group_size!r} is read only with vpp_size > 1; leave it None")
        if isinstance(self.group_size, str):
            if self.group_size != "auto":
                raise PlanError(f'group_size={self.group_size!r} must be an integer, None or "auto"')
        else:
            _require_positive("group_size", self.group_size)
            if self.group_size < self.pp_size:
                raise PlanError(
                    f"group_size={self.group_size} is below pp_size={self.pp_size}; Megatron's interleaved "
                    f"schedule needs at least {self.pp_size}"
                )

    def _check_mode(self) -> None:
        if self.max_tokens is None and self.mode != "padded":
            raise PlanError(f'mode={self.mode!r} needs max_tokens; only mode "padded" works without a cap')
        if self.mode == "padded" and self.max_tokens is None and self.rows is None:
            raise PlanError('mode "padded" needs rows (sequences per micro-batch) or max_tokens')
        if self.mode != "padded" and self.rows is not None:
            raise PlanError(f'rows={self.rows} is read in mode "padded" only, not in {self.mode!r}')
        if self.mode == "packed" and self.sequence_length_round != 1:
            raise PlanError(
                f"sequence_length_round={self.sequence_length_round} is read in rectangles only; "
                "in mode 'packed' ask for sequence_multiple"
            )
        if self.max_tokens is not None and self.usable_tokens < 1:
            raise PlanError(
                f"max_tokens={self.max_tokens} is below the alignment of one micro-batch "
                f"({self.micro_batch_alignment} tokens for this layout); raise the cap"
            )

    @property
    def sequence_alignment(self) -> int:
        """Every slot is a multiple of this: 2*cp when cp > 1, and what `sequence_multiple` asks."""
        layout = 2 * self.cp_size if self.cp_size > 1 else 1
        if self.sequence_multiple is None:
            return layout
        if isinstance(self.sequence_multiple, str):
            return math.lcm(layout, 2 * self.cp_size * self.tp_size)
        return math.lcm(layout, self.sequence_multiple)

    @property
    def pack_alignment(self) -> int:
        """Every pack's tokens are a multiple of this: CP halves, and precision and SP on a rank's share."""
        share = self.cp_size * self.pack_multiple * (self.tp_size if self.sequence_parallel else 1)
        return math.lcm(2 * self.cp_size if self.cp_size > 1 else 1, share)

    @property
    def rectangle_alignment(self) -> int:
        """Every row length of a rectangle is a multiple of this."""
        return math.lcm(self.sequence_length_round, self.sequence_alignment, self.pack_alignment)

    @property
    def micro_batch_alignment(self) -> int:
        """The cheapest legal micro-batch, in tokens: what a filler computes."""
        if self.mode == "packed":
            return math.lcm(self.pack_alignment, self.sequence_alignment)
        return self.rectangle_alignment

    @property
    def usable_tokens(self) -> int:
        """Slots that fit below the cap once the pack is aligned (0 or less: none). Needs `max_tokens`."""
        if self.max_tokens is None:
            raise PlanError("usable_tokens needs max_tokens")
        alignment = self.pack_alignment if self.mode == "packed" else self.rectangle_alignment
        usable = self.max_tokens // alignment * alignment
        return usable if usable >= self.micro_batch_alignment else 0

    @property
    def row_limit(self) -> int | None:
        """Mode "padded": the longest sample that a row of `padded_length` holds; None without a limit."""
        return self.padded_length if self.mode == "padded" else None

    @property
    def interleaved(self) -> bool:
        """Whether Megatron's interleaved schedule runs, with its rule for the micro-batch count."""
        return self.vpp_size > 1

    @property
    def _expert_ranks(self) -> int:
        """Ranks of TP x CP x DP that exchange tokens at every layer with experts."""
        return self.ep_size * (self.etp_size or self.tp_size)

    @property
    def lockstep_ranks(self) -> int:
        """How many consecutive DP ranks wait for each other at every micro-batch, given the objective.

        1: ranks meet once per step. `dp_size`: all of them, with shards that are gathered layer by layer, and where
        they compute the same shapes. In between: the DP ranks that one expert group of Megatron's (order
        "tp-cp-ep-dp") reaches, and those that its neighbours in TP and CP link to them.
        """
        if self.objective == "rank_total":
            return 1
        if self.objective == "lockstep" or self.fully_sharded or self.shared_shapes:
            return self.dp_size
        replica = self.tp_size * self.cp_size
        return math.lcm(self._expert_ranks, replica) // replica

    def to_dict(self) -> dict[str, Any]:
        """Plain values by field name; `PlanConstraints(**d)` restores it."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def _require_positive(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise PlanError(f"{name}={value!r} must be an integer of at least 1")
