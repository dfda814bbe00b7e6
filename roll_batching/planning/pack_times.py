"""Predicted time of a pack by context-parallel size, from a model's FLOPs and a cluster's rates.

A pack with sequences of `L_i` tokens on a group of `c` context-parallel ranks takes

    max(fixed(c) + sum of sequence(L_i, c), floor)

nanoseconds on each pipeline stage, forward and backward. Values are integers made by elementwise float64 arithmetic, so
that equal inputs give equal plans on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated

import numpy as np
from annotated_types import Ge, Le, Lt, Unit, doc
from numpy.typing import NDArray

from roll_batching.checked_fields import CheckedFields, Count, NotNegative
from roll_batching.errors import PlanError
from roll_batching.planning.arrays import Ints, kind_of
from roll_batching.planning.constraints import SMALLEST_SLICE, ParallelDims
from roll_batching.planning.cost_model import ChunkCosts, FlopsCost, LinearQuadraticCost
from roll_batching.planning.plan_arrays import NANOSECONDS
from roll_batching.planning.recurrent_exchange import RecurrentExchange

Floats = NDArray[np.float64]

BYTES = 2
"""Bytes of an activation in 16 bits."""
LONGEST_TIME = 1e4
"""Most seconds of a part of a pack: sums over 2^18 sequences stay within int64 nanoseconds."""
LONGEST_LATENCY = 4e-3
"""Most seconds of a collective without data: gloo on a CPU takes 1.2 ms, and more would be milliseconds."""


FlopRate = Annotated[float, Ge(1e9), Le(1e18), Unit("FLOP/s")]
Bandwidth = Annotated[float, Ge(1e6), Le(1e16), Unit("bytes/s")]
Latency = Annotated[float, Ge(0), Le(LONGEST_LATENCY), Unit("seconds")]
LayerTime = Annotated[float, Ge(0), Lt(0.05), Unit("seconds")]
Tokens = Annotated[float, Ge(0), Le(1_000_000), Unit("tokens")]
Few = Annotated[int, Ge(1), Le(65_536)]


@dataclass(frozen=True, kw_only=True)
class Cluster(CheckedFields, error=PlanError):
    """Rates of devices and links. Defaults: estimates for H100s with NVLink and one 400 Gb/s link per device.

    Bounds are generous for real hardware: a value outside of them is in another unit.
    """

    matmul_rate: Annotated[FlopRate, doc("FLOP/s of large matrix products.")] = 0.60 * 989e12
    matmul_half_tokens: Annotated[
        Tokens, doc("Tokens per device at which matrix products reach half of matmul_rate, without tensor parallelism.")
    ] = 300.0
    attention_rate: Annotated[FlopRate, doc("FLOP/s of attention kernels, both passes together.")] = 0.42 * 989e12
    attention_tile: Annotated[Few, doc("Tokens of a tile of the attention kernel, which computes whole tiles.")] = 128
    devices_per_node: Annotated[Few, doc("Devices of a machine.")] = 8
    node_bandwidth: Annotated[Bandwidth, doc("Bytes/s per device of collectives within a machine.")] = 300e9
    network_bandwidth: Annotated[Bandwidth, doc("Bytes/s per device of collectives between machines.")] = 42e9
    node_latency: Annotated[Latency, doc("Seconds of a collective without data, within a machine.")] = 25e-6
    network_latency: Annotated[Latency, doc("Seconds of a collective without data, between machines.")] = 60e-6
    slice_tokens: Annotated[Few, doc("Tokens per device of a slice, at least, under pipeline_slices: auto.")] = (
        SMALLEST_SLICE
    )
    layer_floor: Annotated[LayerTime, doc("Shortest seconds of a layer, both passes: kernel launches, Python.")] = 1e-3


def weigh_cost(cost: FlopsCost, cluster: Cluster) -> FlopsCost:
    """`cost` with attention and the fixed part of a micro-batch in FLOPs of matrix products that take as long.

    Where the cluster has the default estimate of one of them, that part of `cost` stays.
    """
    default = Cluster()
    weight = cluster.matmul_rate / cluster.attention_rate
    if cluster.matmul_half_tokens != default.matmul_half_tokens:
        cost = replace(cost, fixed=round(cost.linear * cluster.matmul_half_tokens))
    if weight == default.matmul_rate / default.attention_rate:
        return cost
    chunks = cost.chunks  # only ratios of their integers are read
    if chunks is not None:
        linear = tuple(value << 10 for value in chunks.linear)
        chunks = ChunkCosts(linear=linear, quadratic=tuple(round(value * weight * 1024) for value in chunks.quadratic))
    return replace(cost, quadratic=round(cost.quadratic * weight), pair_flops=cost.quadratic, chunks=chunks)


@dataclass(frozen=True, kw_only=True)
class PackTimes(CheckedFields, error=PlanError):
    """Time of packs by context-parallel size, in integer nanoseconds of one pipeline stage, forward and backward."""

    linear: NotNegative
    """FLOPs per token of the whole model, forward and backward."""
    quadratic: NotNegative
    """FLOPs per squared token of the whole model, forward and backward."""
    num_layers: Count
    hidden_size: Count
    kv_size: Count
    """Elements of the keys and values of one token in one layer, together."""
    attention_layers: NotNegative | None = None
    """Layers with keys and values; None: all."""
    recurrent: RecurrentExchange | None = None
    """What ranks send in recurrent layers; None: the model has none."""
    tp_size: Count = 1
    pp_size: Count = 1
    overlapped_exchange: bool = False
    """Whether keys and values travel in a ring behind attention (TransformerEngine's "p2p") instead of an all-gather
    before it (the local attention core)."""
    cluster: Cluster = field(default_factory=Cluster)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.cluster, Cluster):
            raise PlanError(f"PackTimes.cluster is {kind_of(self.cluster)}: pass a Cluster")

    @classmethod
    def of_model(
        cls,
        cost: LinearQuadraticCost,
        *,
        num_layers: int,
        hidden_size: int,
        num_query_groups: int,
        kv_channels: int,
        attention_layers: int | None = None,
        recurrent: RecurrentExchange | None = None,
        tp_size: int = 1,
        pp_size: int = 1,
        overlapped_exchange: bool = False,
        cluster: Cluster | None = None,
    ) -> PackTimes:
        """Times of a model from its `FlopsCost` for one TP and CP rank of `tp_size` (`cp_size` 1)."""
        return cls(
            linear=float(cost.linear) * tp_size,
            quadratic=float(cost.quadratic) * tp_size,
            num_layers=num_layers,
            hidden_size=hidden_size,
            kv_size=2 * num_query_groups * kv_channels,
            attention_layers=attention_layers,
            recurrent=recurrent,
            tp_size=tp_size,
            pp_size=pp_size,
            overlapped_exchange=overlapped_exchange,
            cluster=Cluster() if cluster is None else cluster,
        )

    def require_layout(self, dims: ParallelDims) -> None:
        """Raise `PlanError` unless these are times of the layout `dims`."""
        for name in ("tp_size", "pp_size"):
            if getattr(self, name) != getattr(dims, name):
                raise PlanError(
                    f"times are predicted for {name}={getattr(self, name)}, and the plan is for {getattr(dims, name)}: "
                    "make both from one layout"
                )

    @property
    def stage_layers(self) -> float:
        """Layers of one pipeline stage."""
        return self.num_layers / self.pp_size

    @property
    def _attention_layers(self) -> float:
        """Layers of one pipeline stage with keys and values."""
        return (self.num_layers if self.attention_layers is None else self.attention_layers) / self.pp_size

    def sequences(self, lengths: Ints, cp_size: int) -> Ints:
        """int64[n]: time that each sequence adds to a pack on `cp_size` ranks."""
        tokens = self._computed(lengths, cp_size)
        matmul = self.linear / (self.tp_size * self.pp_size) * tokens / cp_size / self.cluster.matmul_rate
        seconds = matmul + self._attention(tokens, cp_size) + self.tensor_parallel(tokens / cp_size)
        if cp_size > 1:
            seconds = seconds + self._exchange(tokens, cp_size)
        _refuse_beyond(float(seconds.max(initial=0.0)), "a sequence")
        times: Ints = np.rint(seconds * NANOSECONDS).astype(np.int64)
        return times

    def exchanges(self, lengths: Ints, cp_size: int) -> Ints:
        """int64[n]: the part of `sequences` in which ranks wait for keys and values, and what recurrent layers send."""
        if cp_size == 1:
            return np.zeros(len(lengths), dtype=np.int64)
        seconds = self._exchange(self._computed(lengths, cp_size), cp_size)
        times: Ints = np.rint(seconds * NANOSECONDS).astype(np.int64)
        return times

    def exchange_cost(self, cp_size: int) -> int:
        """Cost of the exchange of one token's keys and values, in the FLOPs of one rank that `FlopsCost` counts."""
        if cp_size == 1:
            return 0
        seconds = float(self._exchange(np.array([1e6]), cp_size)[0]) / 1e6
        return int(seconds * self.cluster.matmul_rate * self.pp_size)

    def fixed(self, cp_size: int) -> int:
        """The part of a pack's time on `cp_size` ranks that does not depend on its sequences."""
        half = self.cluster.matmul_half_tokens * self.tp_size**0.5
        seconds = self.linear / self.tp_size / self.pp_size * half / self.cluster.matmul_rate
        seconds += self._exchange_latency(cp_size)
        _refuse_beyond(seconds, "a pack without sequences")
        return int(np.rint(seconds * NANOSECONDS))

    def exchange_latency(self, cp_size: int) -> int:
        """The part of `fixed` during which the exchange of keys and values waits for links to answer."""
        return int(np.rint(self._exchange_latency(cp_size) * NANOSECONDS))

    @property
    def floor(self) -> int:
        """Shortest time of a pack."""
        seconds = self.stage_layers * self.cluster.layer_floor
        _refuse_beyond(seconds, "the shortest pack")
        return int(np.rint(seconds * NANOSECONDS))

    def pack(self, lengths: Ints, cp_size: int) -> int:
        """Time of one pack of `lengths` on `cp_size` ranks."""
        return max(self.fixed(cp_size) + int(self.sequences(lengths, cp_size).sum()), self.floor)

    def _within_node(self, cp_size: int) -> bool:
        return cp_size * self.tp_size <= self.cluster.devices_per_node

    def _bandwidth(self, cp_size: int) -> float:
        """Bytes/s per device of the exchange of keys and values."""
        cluster = self.cluster
        if self._within_node(cp_size):
            return cluster.node_bandwidth
        if self.overlapped_exchange:
            return cluster.network_bandwidth  # a ring passes the slowest link
        # An all-gather between nodes uses the links of all CP ranks of a node.
        links = min(max(1, cluster.devices_per_node // self.tp_size), cp_size)
        return min(cluster.node_bandwidth, cluster.network_bandwidth * links)

    def _computed(self, lengths: Ints, cp_size: int) -> Floats:
        """Tokens of each sequence, rounded up to whole chunks of its ranks."""
        unit = 2 * cp_size if cp_size > 1 else 1
        tokens: Floats = np.ceil(np.asarray(lengths, np.float64) / unit) * unit
        return tokens

    def _attention(self, tokens: Floats, cp_size: int) -> Floats:
        """Seconds of the attention of each sequence."""
        tile = self.cluster.attention_tile
        chunk = tokens / (2 * cp_size) if cp_size > 1 else tokens
        tiles = np.ceil(chunk / tile) * tile / np.maximum(chunk, 1)
        work = self.quadratic / (self.tp_size * self.pp_size) * tokens * tokens / cp_size * tiles
        seconds: Floats = work / self.cluster.attention_rate
        return seconds

    def _exchange(self, tokens: Floats, cp_size: int) -> Floats:
        """Seconds in which ranks wait for keys and values: forward, again in the backward, and for their gradients.

        What recurrent layers send forward comes back as its gradients.
        """
        volume = 3 * self._attention_layers * tokens * (cp_size - 1) / cp_size * self.kv_size * BYTES / self.tp_size
        seconds: Floats = volume / self._bandwidth(cp_size)
        if self.overlapped_exchange:
            seconds = np.maximum(0.0, seconds - self._attention(tokens, cp_size) * (cp_size - 1) / cp_size)
        if self.recurrent is not None:
            received = 2 * self.recurrent.layers / self.pp_size * self.recurrent.received(tokens, cp_size)
            seconds = seconds + received / self._bandwidth(cp_size)
        return seconds

    def _exchange_latency(self, cp_size: int) -> float:
        cluster = self.cluster
        if cp_size == 1:
            return 0.0
        collectives = 3 * self._attention_layers
        if self.recurrent is not None:
            collectives += 4 * self.recurrent.layers / self.pp_size  # two, and two for their gradients
        return collectives * (cluster.node_latency if self._within_node(cp_size) else cluster.network_latency)

    def tensor_parallel(self, tokens: Floats) -> Floats:
        """Seconds of 8 TP collectives per layer (2 at attention, 2 at the MLP, per pass), half hidden by products."""
        if self.tp_size == 1:
            return np.zeros_like(tokens)
        volume = self.stage_layers * 8 * tokens * self.hidden_size * BYTES * (self.tp_size - 1) / self.tp_size
        seconds: Floats = volume / self.cluster.node_bandwidth * 0.5
        return seconds


def _refuse_beyond(seconds: float, what: str) -> None:
    if not seconds <= LONGEST_TIME:
        raise PlanError(
            f"{what} is predicted to take {seconds:.3g} s on a stage, and at most {LONGEST_TIME:,.0f} s can be "
            "planned: check the rates of the cluster (matmul_rate, attention_rate, bandwidths, latencies, layer_floor)"
        )
