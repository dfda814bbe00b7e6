"""Measures the rates of `Cluster` on all ranks, for a file that plans, simulations and jobs read."""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import yaml
from pydantic import ValidationError

from roll_batching.distributed.parallel_layout import start_processes
from roll_batching.errors import ConfigError, PlanError
from roll_batching.files import atomic_file, check_replaceable
from roll_batching.losses import SFTLoss
from roll_batching.planning import ParallelDims
from roll_batching.planning.cluster_fit import fit_cluster
from roll_batching.planning.pack_times import LONGEST_LATENCY, Cluster
from roll_batching.samples import FieldSpec, SampleBatch, gather_lengths
from roll_batching.settings import ArchitectureConfig, RoleSettings
from roll_batching.settings.cluster_file import WRITTEN_BY
from roll_batching.settings.model_cost import architecture_pack_times
from roll_batching.strategy import MegatronTrainStrategy
from roll_batching.strategy.step_prediction import device_name
from roll_batching.tools.doctor.machine import package_versions
from roll_batching.tools.doctor.session import Session, Steps

SMALL_SHAPE = ArchitectureConfig(
    hidden_size=256, ffn_hidden_size=768, num_layers=2, num_attention_heads=4, vocab_size=2048
)
"""The model that is measured without --model."""
LAYERS = 2
"""Decoder layers that are measured; the vocabulary shrinks alike, so that the output head has the model's share."""
MEASURED = "rates of all ranks"
"""Condition of later checks: every rank has measured its rates, though one may be slow."""
REPEATS, LONGEST_PACK, LONGEST_SECONDS = 7, 16_384, 0.4
"""Packs grow up to one that takes so many tokens or seconds."""
LEAST_SPREAD = 0.05
"""Ranks whose times differ by less are equal."""
_FITTED = ("matmul_rate", "matmul_half_tokens", "attention_rate", "layer_floor")
_TILES = (1, 128)
_CALLS = 5


def measured_shape(shape: ArchitectureConfig) -> ArchitectureConfig:
    """`shape` with `LAYERS` layers and their share of the vocabulary. Raises `ConfigError` if its layers differ."""
    layers = min(LAYERS, shape.num_layers)
    changes = {"num_layers": layers, "vocab_size": -(-shape.vocab_size * layers // shape.num_layers), "vision": None}
    changes |= {"mtp_num_layers": None, "max_position_embeddings": LONGEST_PACK}
    try:
        return ArchitectureConfig.model_validate(shape.model_dump() | changes)
    except ValidationError as error:
        raise ConfigError(
            f"--model: {LAYERS} layers of this model cannot be built alone ({error.errors()[0]['msg']}): give a model "
            "of the same width whose layers are equal"
        ) from None


def check_rates(session: Session, shape: ArchitectureConfig) -> Steps:
    """A slow rank, which all others wait for in every step."""
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    session.device = start_processes()
    measured = _measure_packs(shape)
    seconds = {f"{len(pack)} x {pack[0]}": times for pack, times in measured.items()}
    place = {"device": device_name(session.device), "host": socket.gethostname()}
    values = yield {**place, "seconds": seconds, **_fit(shape, measured)}
    hosts, (slowness, spread) = [value["host"] for value in values], _compare([value["seconds"] for value in values])
    usual = max(LEAST_SPREAD, statistics.median_low(spread))
    slow = {rank: _rounded(x) for rank, x in enumerate(slowness) if x > 1 + max(usual, spread[rank])}
    # Ranks end a step with the slowest, so its rates predict steps.
    slowest = values[max(range(len(values)), key=slowness.__getitem__)]
    problems = [f"rank {rank} ({hosts[rank]}) takes {x:.3g} times as long as others" for rank, x in slow.items()]
    if unfit := [f"rank {rank}: {value['unfit']}" for rank, value in enumerate(values) if "unfit" in value]:
        return [*problems, *unfit, "no file is written"], ""
    session.kept["cluster"] = rates = slowest["rates"]
    session.kept["findings"] = {
        "device": ", ".join(sorted({value["device"] for value in values})),
        "hosts": {host: hosts.count(host) for host in sorted(set(hosts))},
        "slow_ranks": slow,
        "spread": {
            name: _spread([x for value in values for x in value["quartiles"].get(name, ())])
            for name in slowest["quartiles"]
        },
        "measured": {
            "relative error of the fit": _rounded(slowest["residual"]),
            "seconds by pack": {pack: _rounded(statistics.median(times)) for pack, times in slowest["seconds"].items()},
        },
    }
    session.passed[MEASURED] = True
    shown = f"{rates['matmul_rate']:.3g} FLOP/s in products, {rates['attention_rate']:.3g} in attention"
    return problems, f"{shown}; the fit is off by {slowest['residual']:.0%}"


def _measure_packs(shape: ArchitectureConfig) -> dict[tuple[int, ...], list[float]]:
    """Seconds of forward and backward passes by pack, `REPEATS` of each, from small packs to the first that is long."""
    role = {
        "model_args": {"architecture": shape.model_dump()},
        "strategy_args": {"strategy_name": "megatron_train"},
        "use_sequence_packing": True,
        "sequence_packing_args": {"max_packed_sequence_length_train": LONGEST_PACK},
    }
    strategy = MegatronTrainStrategy(RoleSettings.model_validate(role))
    strategy.initialize()

    def measure(pack: tuple[int, ...]) -> float:
        tokens = torch.arange(sum(pack)) * 7919 % shape.vocab_size
        fields = {"input_ids": tokens, "response_mask": torch.ones_like(tokens, dtype=torch.bool)}
        batch = SampleBatch(
            torch.arange(len(pack)), torch.tensor(pack), fields, dict.fromkeys(fields, FieldSpec("token"))
        )
        phases = strategy.train_step(batch, strategy.plan(gather_lengths(batch)), SFTLoss()).phases
        return phases["forward_backward"] + phases["loss"]

    packs: list[tuple[int, ...]] = []
    tokens, seconds = 64, 0.0
    while tokens <= LONGEST_PACK and (tokens <= 512 or seconds < LONGEST_SECONDS):
        of_size = [(tokens,), (tokens // 4,) * 4, (tokens // 16,) * 16]
        packs += of_size
        seconds = max((measure(pack), measure(pack))[1] for pack in of_size)  # the first call may compile
        tokens *= 2
    rounds = [[measure(pack) for pack in packs] for _ in range(REPEATS)]  # a busy moment delays different packs
    return {pack: list(times) for pack, times in zip(packs, zip(*rounds, strict=True), strict=True)}


def _fit(shape: ArchitectureConfig, measured: Mapping[tuple[int, ...], Sequence[float]]) -> dict[str, Any]:
    """Fitted rates, those of the quartiles of times, and the relative error; or why times fit no rates."""
    packs, seconds = list(measured), np.array(list(measured.values()))
    times = [architecture_pack_times(shape, ParallelDims(), cluster=Cluster(attention_tile=tile)) for tile in _TILES]
    fits = []
    try:
        for share in (0.5, 0.25, 0.75):
            of_tiles = [fit_cluster(each, packs, np.quantile(seconds, share, axis=1)) for each in times]
            fits.append(min(of_tiles, key=lambda fit: fit.residual))
    except PlanError as error:
        return {"unfit": str(error)}
    # Where no pack takes the floor, the fit keeps the estimate, which is no measurement.
    names = [name for name in _FITTED if getattr(fits[0].cluster, name) != getattr(Cluster(), name)]
    return {
        "rates": {name: getattr(fits[0].cluster, name) for name in (*names, "attention_tile")},
        "quartiles": {name: [getattr(fit.cluster, name) for fit in fits[1:]] for name in names},
        "residual": fits[0].residual,
    }


def _compare(seconds: Sequence[Mapping[str, Sequence[float]]]) -> tuple[list[float], list[float]]:
    """(Time over that of the median rank, relative quartile range of repetitions) of each rank, over common packs."""
    packs = [pack for pack in seconds[0] if all(pack in of_rank for of_rank in seconds)]
    middle = np.median([[of_rank[pack] for pack in packs] for of_rank in seconds], axis=2)  # [ranks, packs]
    common = np.sort(middle, axis=0)[(len(seconds) - 1) // 2]
    spread = [statistics.median(_spread(of_rank[pack]) for pack in packs) for of_rank in seconds]
    return np.median(middle / common, axis=1).tolist(), spread


def _spread(values: Sequence[float]) -> float:
    """Quartile range over the median."""
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75))
    return _rounded((high - low) / max(middle, 1e-12))


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


# ---- links


def check_links(session: Session) -> Steps:
    """A network that is slower than plans assume."""
    hosts: list[Any] = [None] * session.world_size
    dist.all_gather_object(hosts, socket.gethostname())
    groups, measured = _groups(hosts), dict[str, list[float]]()
    large = (64 << 20) if session.device.type == "cuda" else (1 << 20)
    for name, (size, members_of_groups) in groups.items():
        for members in members_of_groups:
            group = dist.new_group(members)  # on all ranks, also those that are not in it
            if session.rank in members:
                latency, seconds = (_measure_gather(group, size, part, session.device) for part in (64, large))
                measured[name] = [latency, large * (size - 1) / max(seconds - latency, seconds / 2)]
        dist.barrier()
    values = yield measured
    findings, rates = session.kept["findings"], dict[str, float](devices_per_node=max(map(hosts.count, hosts)))
    for name in groups:  # of each kind the largest comes last, and counts
        columns = zip(*(value[name] for value in values if name in value), strict=True)
        for rate, column in zip(("latency", "bandwidth"), columns, strict=True):
            key = f"{name.split()[0]}_{rate}"
            middle = findings["measured"][f"{rate} of a {name}"] = _rounded(statistics.median(column))
            rates[key] = min(middle, LONGEST_LATENCY) if rate == "latency" else middle
            findings["spread"][key] = _spread(column)
    session.kept["cluster"] |= rates
    return [], ", ".join(f"{name} {rate:.3g}" for name, rate in rates.items())


def _groups(hosts: Sequence[str]) -> dict[str, tuple[int, list[list[int]]]]:
    """(Size, members) of groups within and between hosts, by kind and size: powers of two, and the largest."""
    nodes = [[rank for rank, other in enumerate(hosts) if other == host] for host in dict.fromkeys(hosts)]
    across = [list(group) for group in zip(*nodes, strict=False)] if len(nodes) > 1 else []  # a rank of each host
    groups = {}
    for kind, sets in {"node": nodes, "network": across}.items():
        most = max(map(len, sets), default=1)
        for size in sorted({2**power for power in range(1, most.bit_length())} | ({most} - {1})):
            parts = [each[at : at + size] for each in sets for at in range(0, len(each) - size + 1, size)]
            groups[f"{kind} group of {size}"] = (size, parts)
    return groups


def _measure_gather(group: Any, size: int, part: int, device: torch.device) -> float:
    """Median seconds of an all-gather of `part` bytes of each rank."""
    source = torch.zeros(part, dtype=torch.uint8, device=device)
    target = torch.empty(part * size, dtype=torch.uint8, device=device)
    times = []
    for _ in range(2 + REPEATS):
        dist.barrier(group)
        started = time.perf_counter()
        for _ in range(_CALLS):
            dist.all_gather_into_tensor(target, source, group=group)
        target[-1].item()  # waits for the device
        times.append((time.perf_counter() - started) / _CALLS)
    return statistics.median(times[2:])


# ---- the file


def require_own_file(path: Path) -> None:
    """Raises `ConfigError` unless rates may be written to `path`."""
    if path.suffix.lower() not in (".yaml", ".yml"):
        raise ConfigError(f"--calibrate {path}: give the file a name that ends with .yaml")
    check_replaceable(path, "doctor --calibrate", lambda content: WRITTEN_BY.encode() in content[:100])


def write_rates(session: Session, path: Path, model: str) -> None:
    """Writes the measured rates to `path`; `model`: name of the shape that was measured. On rank 0."""
    rates = session.kept["cluster"]
    content = {"written_by": WRITTEN_BY, "date": time.strftime("%Y-%m-%d %H:%M:%S %z"), **session.kept["findings"]}
    content |= {"model": model, "versions": package_versions()}
    content["cluster"] = {name: _rounded(x) if isinstance(x, float) else x for name, x in rates.items()}
    with atomic_file(path) as partial:
        partial.write_text(yaml.safe_dump(content, sort_keys=False, width=120))
