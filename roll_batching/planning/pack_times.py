"""Predicted time of a pack by context-parallel size, from a model's FLOPs and a cluster's rates.

A pack with sequences of `L_i` tokens on a group of `c` context-parallel ranks takes

    max(fixed(c) + sum of sequence(L_i, c), floor)

nanoseconds on each pipeline stage, forward and backward. Values are integers made by elementwise float64 arithmetic, so
that equal inputs give equal plans on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import numpy as np
from numpy.typing import NDArray

from roll_batching.errors import PlanError
from roll_batching.planning.arrays import Ints
from roll_batching.planning.cost_model import LinearQuadraticCost
from roll_batching.planning.pack_blocks import NANOSECONDS
from roll_batching.planning.plain_values import integer_of, kind_of, switch_of

Floats = NDArray[np.float64]

BYTES = 2
"""Bytes of an activation in 16 bits."""
LONGEST_TIME = 1e4
"""Most seconds of a part of a pack: sums over 2^18 sequences stay within int64 nanoseconds."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Rates of devices and links. Defaults: estimates for H100s with NVLink and one 400 Gb/s link per device."""

    matmul_rate: float = 0.60 * 989e12
    """FLOP/s of large matrix products."""
    matmul_half_tokens: float = 300.0
    """Tokens per device at which matrix products reach half of `matmul_rate`, without tensor parallelism."""
    attention_rate: float = 0.42 * 989e12
    """FLOP/s of attention kernels, forward and backward together."""
    attention_tile: int = 128
    """Tokens of a tile of the attention kernel; a chunk is computed in whole tiles."""
    devices_per_node: int = 8
    node_bandwidth: float = 300e9
    """Bytes/s per device that a collective reaches within a node."""
    network_bandwidth: float = 42e9
    """Bytes/s per device that a collective reaches between nodes."""
    node_latency: float = 25e-6
    """Seconds of a collective without data, within a node."""
    network_latency: float = 60e-6
    """Seconds of a collective without data, between nodes."""
    layer_floor: float = 1e-3
    """Shortest time of a layer, forward and backward, in seconds: kernel launches and Python."""

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
                raise PlanError(f"cluster.{entry.name} is {value!r}: it must be a finite number of at least 0")
        for name in ("matmul_rate", "attention_rate", "attention_tile", "devices_per_node"):
            if getattr(self, name) <= 0:
                raise PlanError(f"cluster.{name} is {getattr(self, name)!r}: it must be above 0")
        for name in ("node_bandwidth", "network_bandwidth"):
            if getattr(self, name) <= 0:
                raise PlanError(f"cluster.{name} is {getattr(self, name)!r} bytes/s: it must be above 0")


@dataclass(frozen=True, kw_only=True)
class PackTimes:
    """Time of packs by context-parallel size, in integer nanoseconds of one pipeline stage, forward and backward."""

    linear: float
    """FLOPs per token of the whole model, forward and backward."""
    quadratic: float
    """FLOPs per squared token of the whole model, forward and backward."""
    num_layers: int
    hidden_size: int
    kv_size: int
    """Elements of the keys and values of one token in one layer, together."""
    tp_size: int = 1
    pp_size: int = 1
    overlapped_exchange: bool = False
    """Whether keys and values travel in a ring behind attention (TransformerEngine's "p2p") instead of an all-gather
    before it (the local attention core)."""
    cluster: Cluster = field(default_factory=Cluster)

    def __post_init__(self) -> None:
        for name in ("linear", "quadratic"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
                raise PlanError(f"PackTimes.{name} is {value!r}: it must be a finite number of at least 0")
        for name in ("num_layers", "hidden_size", "kv_size", "tp_size", "pp_size"):
            object.__setattr__(self, name, integer_of(f"PackTimes.{name}", getattr(self, name)))
        if not isinstance(self.cluster, Cluster):
            raise PlanError(f"PackTimes.cluster is {kind_of(self.cluster)}: pass a Cluster")
        object.__setattr__(self, "overlapped_exchange", switch_of("overlapped_exchange", self.overlapped_exchange))

    @classmethod
    def of_model(
        cls,
        cost: LinearQuadraticCost,
        *,
        num_layers: int,
        hidden_size: int,
        num_query_groups: int,
        kv_channels: int,
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
            tp_size=tp_size,
            pp_size=pp_size,
            overlapped_exchange=overlapped_exchange,
            cluster=Cluster() if cluster is None else cluster,
        )

    @property
    def stage_layers(self) -> float:
        """Layers of one pipeline stage."""
        return self.num_layers / self.pp_size

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
        """int64[n]: the part of `sequences` in which ranks wait for keys and values."""
        if cp_size == 1:
            return np.zeros(len(lengths), dtype=np.int64)
        seconds = self._exchange(self._computed(lengths, cp_size), cp_size)
        times: Ints = np.rint(seconds * NANOSECONDS).astype(np.int64)
        return times

    def fixed(self, cp_size: int) -> int:
        """Time of a pack on `cp_size` ranks beside its sequences."""
        half = self.cluster.matmul_half_tokens * self.tp_size**0.5
        seconds = self.linear / self.tp_size / self.pp_size * half / self.cluster.matmul_rate
        seconds += self._exchange_latency(cp_size)
        _refuse_beyond(seconds, "a pack without sequences")
        return int(np.rint(seconds * NANOSECONDS))

    def exchange_latency(self, cp_size: int) -> int:
        """The part of `fixed` that is latency of the exchange of keys and values."""
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
        """Seconds in which ranks wait for keys and values: forward, again in the backward, and for their gradients."""
        volume = 3 * self.stage_layers * tokens * (cp_size - 1) / cp_size * self.kv_size * BYTES / self.tp_size
        seconds: Floats = volume / self._bandwidth(cp_size)
        if self.overlapped_exchange:
            seconds = np.maximum(0.0, seconds - self._attention(tokens, cp_size) * (cp_size - 1) / cp_size)
        return seconds

    def _exchange_latency(self, cp_size: int) -> float:
        cluster = self.cluster
        if cp_size == 1:
            return 0.0
        return 3 * self.stage_layers * (cluster.node_latency if self._within_node(cp_size) else cluster.network_latency)

    def tensor_parallel(self, tokens: Floats) -> Floats:
        """Seconds of tensor parallelism's collectives, half of them hidden behind matrix products."""
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
