"""Cost models: the cost of a sequence and of a micro-batch.

All costs here are `linear*L + quadratic*L^2` per sequence plus `fixed` per micro-batch, with integer
coefficients, so that equal inputs give equal plans on every machine. `sequence_costs` evaluates a model
exactly and scales the costs to a total below 2^53.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, runtime_checkable

import numpy as np
from annotated_types import Ge
from numpy.typing import ArrayLike, NDArray

from roll_batching.checked_fields import CheckedFields, NotNegative
from roll_batching.errors import PlanError
from roll_batching.planning.arrays import kind_of

TOTAL_BITS = 53
"""Totals stay below 2^53, which float64 represents exactly."""

FLOPS_PER_WEIGHT = 6
"""Training FLOPs per token and weight: 2 (multiply, add) x 3 (a forward pass, a backward pass of twice its cost)."""
FIXED_TOKENS = 512
"""Fixed cost of a micro-batch in tokens, where it has not been measured.

Measured by `benchmarks/bench_fixed.py`: 150 on a CPU core. On an H100, steps of the Qwen3-1.7B shape run no kernel for
the time of 830 tokens per micro-batch (`results/`).
"""


Cost = Annotated[int, Ge(0)]


@runtime_checkable
class CostModel(Protocol):
    """Cost model for the planner: integer costs, monotone in the length."""

    @property
    def fixed(self) -> int:
        """Cost of a micro-batch without its sequences; 0: not known.

        It decides the number of micro-batches in a pipeline, where 0 is replaced by `FIXED_TOKENS` average tokens.
        """
        ...

    def sequence(self, length: int) -> int:
        """Cost of one sequence of `length` tokens, an integer of at least 0."""
        ...


@dataclass(frozen=True, kw_only=True)
class ChunkCosts:
    """Costs `linear*L + quadratic*L^2` of a sequence on each model chunk of a pipeline, in the order of the layers.

    Integers of one unit, not necessarily that of the cost model: only their ratios are read.
    """

    linear: tuple[int, ...]
    quadratic: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("linear", "quadratic"):
            values = tuple(getattr(self, name))
            if any(isinstance(v, bool) or not isinstance(v, int | np.integer) or v < 0 for v in values):
                raise PlanError(f"ChunkCosts.{name}={values!r} must be integers of at least 0")
            object.__setattr__(self, name, tuple(int(v) for v in values))
        if len(self.linear) != len(self.quadratic) or not any(self.linear + self.quadratic):
            raise PlanError(f"ChunkCosts needs one linear and quadratic cost per chunk, one above 0, and got {self}")

    def shares(self, lengths: NDArray[np.int64]) -> tuple[float, ...]:
        """Cost of each chunk over the mean of all, for sequences of these lengths together."""
        distinct, _, counts = _distinct(lengths)
        pairs = list(zip(distinct.tolist(), counts.tolist(), strict=True))
        tokens, squares = sum(n * count for n, count in pairs), sum(n * n * count for n, count in pairs)
        costs = [a * tokens + b * squares for a, b in zip(self.linear, self.quadratic, strict=True)]
        return tuple(cost * len(costs) / sum(costs) for cost in costs)


@dataclass(frozen=True)
class LinearQuadraticCost(CheckedFields, error=PlanError):
    """Cost `linear*L + quadratic*L^2` per sequence, `fixed` per micro-batch; integers of any unit.

    `chunks` has the costs of a pipeline's model chunks where they differ; None: all cost the same. `exchange` is the
    cost of a token whose keys a slice gathers again under context parallelism. The defaults 24576 and 1 are those of
    verl and ROLL (6 x hidden size 4096, a dense 7B).
    """

    linear: Cost = 24576
    quadratic: Cost = 1
    fixed: Cost = 0
    chunks: ChunkCosts | None = None
    exchange: Cost = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunks is not None and not isinstance(self.chunks, ChunkCosts):
            raise PlanError(f"{type(self).__name__}.chunks is {kind_of(self.chunks)}: pass ChunkCosts, or None")
        if self.linear == 0 and self.quadratic == 0:
            raise PlanError(f"{type(self).__name__} got linear=0 and quadratic=0: give at least one above 0")

    def sequence(self, length: int) -> int:
        """Cost of one sequence of `length` tokens."""
        return self.linear * length + self.quadratic * length * length


def token_cost(*, fixed: int = 0) -> LinearQuadraticCost:
    """Cost by number of tokens."""
    return LinearQuadraticCost(linear=1, quadratic=0, fixed=fixed)


def quadratic_cost(*, fixed: int = 0) -> LinearQuadraticCost:
    """Cost by squared lengths, TRL's measure of attention."""
    return LinearQuadraticCost(linear=0, quadratic=1, fixed=fixed)


DEFAULT_COST = LinearQuadraticCost(fixed=24576 * FIXED_TOKENS)
"""Default cost: a dense 7B, with a fixed cost of `FIXED_TOKENS` tokens per micro-batch."""


@dataclass(frozen=True)
class ScaledCosts:
    """Scaled integer costs: `values[i]` (int64[n]) is the exact cost >> `shift`, with a total below 2^53."""

    values: NDArray[np.int64]
    fixed: int
    shift: int


def require_cost(cost: Any) -> None:
    """Raise `PlanError` unless `cost` is a cost model."""
    if inspect.isclass(cost) or not isinstance(cost, CostModel):
        raise PlanError(
            f"cost is {kind_of(cost)}: pass an object with `fixed` and `sequence(length)`, such as "
            "LinearQuadraticCost(linear=24576, quadratic=1)"
        )
    if isinstance(cost.fixed, bool) or not isinstance(cost.fixed, int | np.integer) or cost.fixed < 0:
        raise PlanError(f"{type(cost).__name__}.fixed={cost.fixed!r} must be an integer of at least 0")


def chunk_shares(cost: Any, lengths: NDArray[np.int64], stages: int, chunks: int) -> tuple[float, ...] | None:
    """Cost of each model chunk over the mean of all; None without `chunks` of the cost model, or without a pipeline.

    Raises `PlanError` if the cost model has another number of chunks.
    """
    costs = getattr(cost, "chunks", None)
    if costs is None or stages == 1:
        return None
    if len(costs.linear) != stages * chunks:
        raise PlanError(
            f"{type(cost).__name__}.chunks has costs of {len(costs.linear)} model chunks, and the layout has pp_size x "
            f"vpp_size = {stages * chunks}: make both from one layout"
        )
    shares: tuple[float, ...] = costs.shares(lengths)
    return shares


def sequence_costs(lengths: NDArray[np.int64], cost: Any) -> ScaledCosts:
    """Exact costs of `lengths` (int64[n]), divided by the smallest power of two that keeps the total < 2^53.

    A cost above zero never becomes zero. Raises `PlanError` if `cost` is not a cost model, or returns a value that is
    not an integer.
    """
    require_cost(cost)
    if isinstance(cost, LinearQuadraticCost):
        largest = cost.sequence(int(lengths.max(initial=0)))
        if max(largest * len(lengths), cost.fixed) < 1 << TOTAL_BITS:
            values = cost.linear * lengths + cost.quadratic * lengths * lengths
            return ScaledCosts(values=values, fixed=cost.fixed, shift=0)
    distinct, inverse, counts = _distinct(lengths)
    exact = [_checked(cost, length) for length in distinct.tolist()]
    total = sum(value * int(count) for value, count in zip(exact, counts, strict=True))
    shift = max(0, max(total, int(cost.fixed)).bit_length() - TOTAL_BITS)
    scaled = np.array([max(value >> shift, 1) if value else 0 for value in exact], dtype=np.int64)
    return ScaledCosts(values=scaled[inverse], fixed=int(cost.fixed) >> shift, shift=shift)


def scaled_costs(lengths: NDArray[np.int64], cost: CostModel, shift: int) -> NDArray[np.int64]:
    """Costs of `lengths` (int64[n], 0 among them) >> `shift`, as `sequence_costs` scales those of a plan."""
    if isinstance(cost, LinearQuadraticCost) and cost.sequence(int(lengths.max(initial=0))) < 1 << 62:
        return cost.linear * lengths + cost.quadratic * lengths * lengths >> shift
    distinct, inverse, _ = _distinct(lengths)
    exact = [_checked(cost, length) >> shift if length else 0 for length in distinct.tolist()]
    return np.array(exact, dtype=np.int64)[inverse]


def _distinct(
    lengths: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Sorted distinct values, position of each element among them, and their counts."""
    largest = int(lengths.max(initial=0))
    if largest <= 4 * len(lengths) + 65536:
        counts = np.bincount(lengths, minlength=largest + 1)
        distinct = np.flatnonzero(counts)
        position = np.zeros(largest + 1, dtype=np.int64)
        position[distinct] = np.arange(len(distinct))
        return distinct.astype(np.int64), position[lengths], counts[distinct].astype(np.int64)
    distinct, inverse, counts = np.unique(lengths, return_inverse=True, return_counts=True)
    return distinct, inverse.astype(np.int64), counts.astype(np.int64)


def _checked(cost: Any, length: int) -> int:
    value = cost.sequence(length)
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 0:
        raise PlanError(
            f"{type(cost).__name__}.sequence({length}) returned {value!r}; a cost is an integer of at "
            "least 0 (scale a float to a finer unit and round it)"
        )
    return int(value)


@dataclass(frozen=True)
class FlopsCost(LinearQuadraticCost):
    """Training FLOPs of a decoder-only transformer, from its shape.

    Forward and backward together count as three forward passes. Causal attention counts half of L^2. The unit is FLOPs
    of one TP x CP rank.
    """

    pair_flops: Cost | None = None
    """FLOPs per squared token where `quadratic` is weighed by measured rates (`pack_times.weigh_cost`)."""

    @classmethod
    def from_model(
        cls,
        *,
        hidden_size: int,
        ffn_hidden_size: int,
        num_layers: int,
        num_attention_heads: int,
        vocab_size: int,
        num_query_groups: int | None = None,
        kv_channels: int | None = None,
        gated_linear_unit: bool = True,
        num_experts: int | None = None,
        num_moe_layers: int | None = None,
        moe_router_topk: int = 1,
        moe_ffn_hidden_size: int | None = None,
        moe_shared_expert_size: int = 0,
        causal: bool = True,
        include_head: bool = True,
        tp_size: int = 1,
        cp_size: int = 1,
        forward_only: bool = False,
        fixed_tokens: int = FIXED_TOKENS,
        chunk_layers: Sequence[tuple[int, int]] | None = None,
    ) -> FlopsCost:
        """Cost model from the multiply-adds of one token and of one pair of tokens.

        With `num_experts`, `num_moe_layers` of the layers (None: all) have experts, of which a token passes
        `moe_router_topk`, and the shared expert where it has a size. `fixed_tokens` is the fixed cost of a micro-batch
        in tokens of the linear part. `chunk_layers` are the layers of each model chunk, the last one with the head, and
        the MoE layers among them. Raises `PlanError` for sizes below 1, and for other numbers of layers.
        """
        _refuse_below_one(
            hidden_size=hidden_size,
            ffn_hidden_size=ffn_hidden_size,
            num_layers=num_layers,
            num_attention_heads=num_attention_heads,
            vocab_size=vocab_size,
            tp_size=tp_size,
            cp_size=cp_size,
        )
        groups = num_query_groups or num_attention_heads
        head_dim = kv_channels or hidden_size // num_attention_heads
        query = num_attention_heads * head_dim
        moe_layer = projections = hidden_size * (2 * query + 2 * groups * head_dim)
        matrices = 3 if gated_linear_unit else 2
        moe_layers = _count_moe_layers(num_layers, num_moe_layers) if num_experts else 0
        dense_layer = projections + matrices * hidden_size * ffn_hidden_size
        if num_experts:
            width = moe_router_topk * (moe_ffn_hidden_size or ffn_hidden_size) + moe_shared_expert_size
            moe_layer += matrices * hidden_size * width + hidden_size * num_experts
        head = hidden_size * vocab_size if include_head else 0
        per_token = (num_layers - moe_layers) * dense_layer + moe_layers * moe_layer + head
        # Scores and weighted values: two products of `query` multiply-adds for each pair of tokens.
        per_pair = num_layers * 2 * query
        halves, flops, ranks = 2 if causal else 1, 2 if forward_only else FLOPS_PER_WEIGHT, tp_size * cp_size
        _check_chunk_layers(chunk_layers, num_layers, moe_layers)
        chunks = _chunk_costs(chunk_layers, (dense_layer, moe_layer), head, 4 * query // halves)
        linear = flops * per_token // ranks
        quadratic = flops * per_pair // halves // ranks
        return cls(linear=linear, quadratic=quadratic, fixed=linear * fixed_tokens, chunks=chunks)


def _chunk_costs(
    chunk_layers: Sequence[tuple[int, int]] | None, per_layer: tuple[int, int], head: int, half_pairs: int
) -> ChunkCosts | None:
    """Costs in half multiply-adds, so that causal attention's half is whole: `half_pairs` per layer and pair of tokens.

    `per_layer` has the multiply-adds per token of a dense layer and of a mixture.
    """
    if chunk_layers is None:
        return None
    dense, mixture = per_layer
    by_token = [2 * ((layers - moe) * dense + moe * mixture) for layers, moe in chunk_layers]
    by_token[-1] += 2 * head
    return ChunkCosts(linear=tuple(by_token), quadratic=tuple(layers * half_pairs for layers, _ in chunk_layers))


def _check_chunk_layers(chunk_layers: Sequence[tuple[int, int]] | None, num_layers: int, moe_layers: int) -> None:
    if chunk_layers is not None and tuple(map(sum, zip(*chunk_layers, strict=True))) != (num_layers, moe_layers):
        raise PlanError(
            f"FlopsCost.from_model: chunk_layers={list(chunk_layers)!r} must add up to {num_layers} layers, "
            f"{moe_layers} of them with experts"
        )


def _refuse_below_one(**sizes: int) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise PlanError(f"FlopsCost.from_model: {name}={value!r} must be at least 1")


def _count_moe_layers(num_layers: int, num_moe_layers: int | None) -> int:
    if num_moe_layers is None:
        return num_layers
    if not 0 <= num_moe_layers <= num_layers:
        raise PlanError(
            f"FlopsCost.from_model: num_moe_layers={num_moe_layers!r} must lie between 0 and num_layers={num_layers!r}"
        )
    return num_moe_layers


@dataclass(frozen=True)
class FittedCost(LinearQuadraticCost):
    """Cost fitted to measured times, in attoseconds; `residual` is the relative RMS error of the fit."""

    residual: NotNegative = 0.0


def fit_cost(lengths: Sequence[ArrayLike], seconds: ArrayLike) -> FittedCost:
    """Fit `fixed + linear*sum(L) + quadratic*sum(L^2)` to measured micro-batch times by least squares.

    `lengths` holds the sequence lengths of each measured micro-batch, `seconds` (float[m]) its time. Coefficients are
    not negative: the best fit among all subsets of coefficients is taken. Raises `PlanError` for fewer than three
    measurements or times that are not finite and above 0.
    """
    packs = [np.atleast_1d(np.asarray(pack, dtype=np.int64)) for pack in lengths]
    times = np.asarray(seconds, dtype=np.float64)
    if times.ndim != 1 or len(packs) != len(times):
        raise PlanError(f"fit_cost: seconds has shape {times.shape}: pass one number for each of {len(packs)} packs")
    if len(times) < 3:
        raise PlanError(f"fit_cost: {len(times)} measurements do not determine three coefficients; measure more")
    if len(wrong := np.flatnonzero(~np.isfinite(times) | (times <= 0))):
        raise PlanError(f"fit_cost: seconds[{wrong[0]}]={times[wrong[0]]} must be finite and above 0: leave it out")
    design = np.array([[1.0, float(pack.sum()), float((pack.astype(np.float64) ** 2).sum())] for pack in packs])
    # Weighted by 1/time: the planner needs small relative errors, also for short micro-batches.
    coefficients = non_negative_fit(design / times[:, None], np.ones_like(times))
    residual = float(np.sqrt(np.mean((design @ coefficients / times - 1.0) ** 2)))
    fixed, linear, quadratic = (int(round(value * 1e18)) for value in coefficients)
    if linear == 0 and quadratic == 0:
        raise PlanError("fit_cost: the times do not grow with the lengths; vary the lengths, measure again")
    return FittedCost(linear=linear, quadratic=quadratic, fixed=fixed, residual=residual)


def non_negative_fit(design: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """Best non-negative least-squares solution of design @ x = target, found by trying every support."""
    columns = design.shape[1]
    scale = np.maximum(np.abs(design).max(axis=0), 1e-300)
    best = np.zeros(columns)
    best_error = float(target @ target)
    for support in range(1, 2**columns):
        chosen = [column for column in range(columns) if support >> column & 1]
        solution, *_ = np.linalg.lstsq(design[:, chosen] / scale[chosen], target, rcond=None)
        if np.any(solution < 0):
            continue
        candidate = np.zeros(columns)
        candidate[chosen] = solution / scale[chosen]
        error = float(np.sum((design @ candidate - target) ** 2))
        if error < best_error:
            best, best_error = candidate, error
    return best
