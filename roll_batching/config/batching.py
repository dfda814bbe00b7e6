"""How the samples of a pass are put into micro-batches: plain values, no torch, no YAML."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from roll_batching.errors import ConfigError

if TYPE_CHECKING:
    from roll_batching.planning import PlanConstraints

Mode = Literal["packed", "dynamic", "padded"]
LogprobPlan = Literal["train", "own", "none"]

PACKED_ALGORITHMS = (
    "load_balance",
    "none",
    "concatenative",
    "first_fit_decreasing",
    "first_fit_shuffle",
    "modified_first_fit_decreasing",
)
DYNAMIC_ALGORITHMS = ("roll", "nemo_rl", "prefer_closest", "prefer_first")
PADDED_ALGORITHMS = ("none",)
ALGORITHMS = {"packed": PACKED_ALGORITHMS, "dynamic": DYNAMIC_ALGORITHMS, "padded": PADDED_ALGORITHMS}
OVERSIZE = ("error", "alone", "truncate", "drop")
OBJECTIVES = ("auto", "rank_total", "lockstep", "pipeline")
_COUNTS = ("max_tokens", "rows", "padded_length", "sequence_length_round", "min_num_micro_batches")


@dataclass(frozen=True, kw_only=True)
class PassBatching:
    """The batching of one kind of pass (training, or forward only). Raises ConfigError when inconsistent."""

    mode: Mode = "packed"
    """Packs without padding, rectangles of similar lengths under a token cap, or rectangles of fixed rows."""
    max_tokens: int | None = None
    """Most tokens that a micro-batch computes, all alignment included; None only in padded mode."""
    algorithm: str = "load_balance"
    """Name of the algorithm within the mode: see `ALGORITHMS`."""
    sequence_length_round: int = 1
    """A rectangle's length is a multiple of this many tokens."""
    rows: int | None = None
    """Sequences per micro-batch in padded mode."""
    padded_length: int | None = None
    """Length of every rectangle in padded mode; None: the longest sequence of the micro-batch."""
    min_num_micro_batches: int = 1
    """Fewest micro-batches per rank and step."""
    shared_shapes: bool = False
    """Whether a micro-batch's rectangle has the same shape on every rank."""
    sequence_multiple: int | str | None = None
    """Multiple that each sequence's slot is rounded up to: a number, or "2*cp*tp"; None: what CP needs."""
    oversize: str = "error"
    """What becomes of a sequence longer than the cap: "error", "alone", "truncate" or "drop"."""
    objective: str = "auto"
    """What the planner balances: "auto" (by the layout), "rank_total", "lockstep" or "pipeline"."""
    seed: int = 0
    """Seed of algorithms that draw at random."""

    def __post_init__(self) -> None:
        if self.mode not in ALGORITHMS:
            raise ConfigError(f"mode {self.mode!r} is unknown; choose packed, dynamic or padded")
        if self.algorithm not in ALGORITHMS[self.mode]:
            raise ConfigError(
                f"algorithm {self.algorithm!r} does not exist in {self.mode} mode; "
                f"choose one of {', '.join(ALGORITHMS[self.mode])}"
            )
        if self.mode != "padded" and self.max_tokens is None:
            raise ConfigError(f"{self.mode} batching needs max_tokens, the most tokens of one micro-batch")
        if self.mode == "padded" and self.rows is None:
            raise ConfigError("padded batching needs rows, the sequences of one micro-batch")
        for name, known in (("oversize", OVERSIZE), ("objective", OBJECTIVES)):
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} {getattr(self, name)!r} is unknown; choose one of {', '.join(known)}")
        for name in _COUNTS:
            _check_count(name, getattr(self, name))
        if self.sequence_multiple != "2*cp*tp":
            if isinstance(self.sequence_multiple, str):
                raise ConfigError(
                    f'sequence_multiple {self.sequence_multiple!r} is unknown; give a whole number, "2*cp*tp" or None'
                )
            _check_count("sequence_multiple", self.sequence_multiple)

    def constraints(
        self,
        *,
        dp_size: int,
        tp_size: int = 1,
        cp_size: int = 1,
        pp_size: int = 1,
        vpp_size: int = 1,
        ep_size: int = 1,
        etp_size: int | None = None,
        fully_sharded: bool = False,
        sequence_parallel: bool = False,
        group_size: int | str | None = None,
        pack_multiple: int = 1,
    ) -> PlanConstraints:
        """What `plan_step` needs to plan this pass in the given parallel layout.

        `ep_size`, `etp_size` (None: `tp_size`) and `fully_sharded` say which ranks wait for each other at every
        micro-batch. `group_size` is Megatron's number of micro-batches per virtual-pipeline group (None: its
        default), `pack_multiple` an extra multiple for the whole pack (16 for some low precisions).
        """
        from roll_batching.planning import PlanConstraints

        return PlanConstraints(
            dp_size=dp_size,
            tp_size=tp_size,
            cp_size=cp_size,
            pp_size=pp_size,
            vpp_size=vpp_size,
            ep_size=ep_size,
            etp_size=etp_size,
            fully_sharded=fully_sharded,
            sequence_parallel=sequence_parallel,
            mode=self.mode,
            max_tokens=self.max_tokens,
            algorithm=self.algorithm,
            sequence_length_round=self.sequence_length_round,
            rows=self.rows,
            padded_length=self.padded_length,
            min_num_micro_batches=self.min_num_micro_batches,
            shared_shapes=self.shared_shapes,
            oversize=self.oversize,
            objective=self.objective,
            seed=self.seed,
            group_size=group_size,
            sequence_multiple=self.sequence_multiple,
            pack_multiple=pack_multiple,
        )


def _check_count(name: str, value: object) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} is {value!r}; it must be a whole number")
    if value < 1:
        raise ConfigError(f"{name} is {value}; it must be at least 1")


@dataclass(frozen=True, kw_only=True)
class BatchingConfig:
    """How training and forward-only passes are cut into micro-batches."""

    train: PassBatching
    """Passes with a backward."""
    infer: PassBatching
    """Passes without one: log-probs with their own plan, evaluation, the reference."""
    logprob_plan: LogprobPlan = "train"
    """Plan of the old log-probs: training's ("train"), their own ("own"), or no such pass ("none")."""

    def __post_init__(self) -> None:
        if self.logprob_plan not in ("train", "own", "none"):
            raise ConfigError(f"logprob_plan {self.logprob_plan!r} is unknown; choose train, own or none")
