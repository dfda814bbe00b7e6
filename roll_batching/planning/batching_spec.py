"""Settings that form micro-batches, independent of the parallel layout."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from roll_batching.checked_fields import CheckedFields, Count, Seed
from roll_batching.errors import ConfigError, PlanError
from roll_batching.planning.registry import ALGORITHMS, algorithm_of

Mode = Literal["packed", "dynamic", "padded"]
Oversize = Literal["error", "alone", "slice", "truncate", "drop"]
Objective = Literal["auto", "rank_total", "lockstep", "pipeline"]


@dataclass(frozen=True, kw_only=True)
class BatchingSpec(CheckedFields, error=PlanError):
    """Mode, cap, algorithm and further settings of micro-batches; checked at construction.

    Raises `PlanError` for values that no plan can satisfy or that the mode does not read.
    """

    mode: Mode = "packed"
    """"packed" (samples end to end), "dynamic" (rectangles of similar lengths) or "padded" (fixed rows)."""

    max_tokens: Count | None = None
    """Cap on the tokens that one micro-batch computes, before CP divides it. None only in mode "padded"."""

    algorithm: str = None  # type: ignore[assignment]  # a name once constructed
    """Name of an algorithm of the mode (see `registry.ALGORITHMS`), or the dotted path of a packer.
    Default by mode: load_balance, roll, none."""

    sequence_length_round: Count = 1
    """Modes "dynamic" and "padded": the rectangle's length is a multiple of this."""

    rows: Count | None = None
    """Mode "padded": sequences per micro-batch; None takes as many as the cap admits."""

    padded_length: Count | None = None
    """Maximum sequence length of the run. Mode "padded": length of each row (None: the longest of the micro-batch).
    Other modes: only the width that the report compares with (`tokens_before`)."""

    min_num_micro_batches: Count = 1
    """Fewest micro-batches per rank."""

    shared_shapes: bool = False
    """All ranks compute one shape at each micro-batch index: the largest among them."""

    pack_shapes: Count | None = None
    """Mode "packed": packs have one of this many lengths, multiples of one length up to the cap, in every step. None:
    packs are as long as their samples."""

    sequence_multiple: Count | Literal["2*cp*tp"] | None = None
    """Alignment of each sequence, in addition to the layout's (2*cp when cp > 1): an integer, or "2*cp*tp"."""

    oversize: Oversize = "error"
    """A sequence or group above the cap: "error", "alone" (a separate micro-batch, above the cap), "slice" (alone, in
    slices of at most the cap), "truncate" or "drop"."""

    objective: Objective = "auto"
    """Objective of load_balance. "auto" and "pipeline": the predicted time of a step in the parallel layout; where
    ranks wait for each other once per step, the largest rank total, and then the lockstep cost. "lockstep": as if all
    ranks waited for each other at every micro-batch. "rank_total": the largest rank total only."""

    seed: Seed = 0
    """Seed of first_fit_shuffle and of searches. Equal seeds make equal plans on all machines."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.algorithm is None:
            object.__setattr__(self, "algorithm", ALGORITHMS[self.mode].names[0])
        self._check_algorithm()
        self._check_mode()

    def _check_algorithm(self) -> None:
        if not isinstance(self.algorithm, str):
            raise PlanError(
                f"algorithm={self.algorithm!r} must be a name, or the path of a packer as package.module:name"
            )
        try:
            algorithm = algorithm_of(self.mode, self.algorithm)
        except ConfigError:
            raise PlanError(
                f"algorithm={self.algorithm!r} does not exist in mode {self.mode!r}; choose one of "
                f"{', '.join(ALGORITHMS[self.mode].names)}, or a packer as package.module:name"
            ) from None
        if self.shared_shapes and self.mode != "packed" and not algorithm.same_positions:
            names = [entry.name for entry in ALGORITHMS[self.mode] if entry.same_positions]
            raise PlanError(
                f"shared_shapes=True needs an algorithm that cuts all ranks at the same positions, unlike "
                f"algorithm={self.algorithm!r}; choose {' or '.join(map(repr, names))}"
            )

    def _check_mode(self) -> None:
        if self.max_tokens is None and self.mode != "padded":
            raise PlanError(f'mode={self.mode!r} needs max_tokens; only mode "padded" works without a cap')
        if self.mode == "padded" and self.max_tokens is None and self.rows is None:
            raise PlanError('mode "padded" needs rows (sequences per micro-batch) or max_tokens')
        if self.mode != "padded" and self.rows is not None:
            raise PlanError(f'rows={self.rows} is read in mode "padded" only, not in {self.mode!r}: leave it out')
        if self.mode != "packed" and self.pack_shapes is not None:
            raise PlanError(f"pack_shapes={self.pack_shapes} is read in mode 'packed' only, not in {self.mode!r}")
        if self.mode != "packed" and self.oversize == "slice":
            raise PlanError(f'oversize="slice" cuts packs, which mode={self.mode!r} does not make: choose "alone"')
        if self.mode == "packed" and self.sequence_length_round != 1:
            raise PlanError(
                f"sequence_length_round={self.sequence_length_round} is not read in mode 'packed'; "
                "set sequence_multiple, or leave it 1"
            )

    @property
    def exceeds_cap(self) -> bool:
        """Whether a sequence or group above the cap is a separate micro-batch."""
        return self.oversize in ("alone", "slice")

    @property
    def row_limit(self) -> int | None:
        """Mode "padded": longest sample that fits into a row; None: no limit."""
        return self.padded_length if self.mode == "padded" else None

    @property
    def batching(self) -> BatchingSpec:
        """These settings without the fields of a subclass."""
        return BatchingSpec(**{field.name: getattr(self, field.name) for field in fields(BatchingSpec)})


def load_algorithm(spec: BatchingSpec) -> Any:
    """Function that forms the micro-batches of `spec`; raises `PlanError` if it cannot be loaded."""
    try:
        algorithm = ALGORITHMS[spec.mode].load(spec.algorithm)
    except ConfigError as error:
        raise PlanError(str(error)) from error
    if not callable(algorithm):
        raise PlanError(f"algorithm={spec.algorithm!r} is a {type(algorithm).__name__}, not a function of Items")
    return algorithm
