"""Joins the Ray cluster of a job, reserves devices on its machines, and places ranks on them."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from roll_batching.errors import ConfigError, RollBatchingError
from roll_batching.jobs.processes.child_process import notify


@dataclass(frozen=True, kw_only=True)
class RankPlacement:
    """Where one rank runs: its machine, and its bundle of the placement group."""

    rank: int
    node: str
    """Ray's id of the machine."""
    bundle: int
    """Index of the placement group's bundle that holds the rank's devices."""
    local_rank: int
    local_size: int
    """Ranks on its machine."""


def bundle_size(tp_size: int, largest_machine: int) -> int:
    """Ranks per bundle: `tp_size`, or if no machine has room for so many, its largest divisor that fits.

    A bundle lies on one machine. `largest_machine`: ranks that fit on the largest machine.
    """
    return max(size for size in range(1, tp_size + 1) if tp_size % size == 0 and size <= max(1, largest_machine))


def place_ranks(bundle_nodes: Sequence[str], size: int) -> list[RankPlacement]:
    """Returns placements of all ranks, `size` per bundle; `bundle_nodes` has the machine of each bundle.

    Consecutive ranks share a machine where possible: bundles are taken machine by machine.
    """
    order = {node: index for index, node in enumerate(dict.fromkeys(bundle_nodes))}
    bundles = sorted(range(len(bundle_nodes)), key=lambda bundle: (order[bundle_nodes[bundle]], bundle))
    slots = [(bundle_nodes[bundle], bundle) for bundle in bundles for _ in range(size)]
    local_sizes = {node: sum(other == node for other, _ in slots) for node in order}
    placements, local_ranks = [], dict.fromkeys(order, 0)
    for rank, (node, bundle) in enumerate(slots):
        local_rank = local_ranks[node]
        placements.append(
            RankPlacement(rank=rank, node=node, bundle=bundle, local_rank=local_rank, local_size=local_sizes[node])
        )
        local_ranks[node] += 1
    return placements


# ---- cluster


LOCAL = "local"
"""Address of a Ray that is started on this machine for the job, and ended with it."""
AUTO = "auto"
"""Address of the Ray that already runs on this machine."""
_CONNECT_SECONDS = 10.0
_SECONDS_BEFORE_NOTICE = 10.0
_OUTPUT_SECONDS = 1.0
"""Ray takes up to this long to print a rank's last output at the driver."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Total resources of one machine of the cluster."""

    node: str
    address: str
    cpus: float
    gpus: float

    def capacity(self, on_gpus: bool) -> int:
        """Ranks that fit when nothing else runs."""
        return int(min(self.cpus, self.gpus) if on_gpus else self.cpus)


def check_address(address: str) -> None:
    """Raises ConfigError when there is no Ray at `address`: Ray itself would retry for minutes.

    Raises RollBatchingError when Ray is not installed.
    """
    if importlib.util.find_spec("ray") is None:
        raise RollBatchingError("--launcher ray needs Ray: pip install 'roll-batching[ray]'")
    if address in (LOCAL, AUTO):
        return
    if address.startswith("ray://"):
        raise ConfigError(
            f"--address {address} is Ray's client, which cannot run a job: start the command on a machine of the "
            f"cluster with --address {AUTO}, or submit it with `ray job submit`"
        )
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
    except ValueError:
        raise ConfigError(f"--address {address}: use {AUTO}, {LOCAL} or HOST:PORT") from None
    except OSError as error:
        raise _no_ray(address, str(error)) from None


@contextlib.contextmanager
def connected(address: str, cpus: int) -> Iterator[None]:
    """Joins the Ray at `address`, or starts one with `cpus` CPUs for `local`; leaves it after the block.

    Raises ConfigError when there is none, RollBatchingError when it cannot be joined.
    """
    import ray

    if not sys.stdout.isatty():
        os.environ.setdefault("RAY_COLOR_PREFIX", "0")
    options: dict[str, Any] = {"address": address, "logging_level": "error"}
    if address == LOCAL:
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        options |= {"num_cpus": cpus, "include_dashboard": False}
    try:
        ray.init(**options)
    except ConnectionError as error:
        raise _no_ray(address, str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__) from None
    except Exception as error:  # Ray raises plain ones, as for processes that did not start within its 30 s
        problem = f"the Ray at {address} cannot be joined"
        problem = "a local Ray cluster cannot be started" if address == LOCAL else problem
        raise RollBatchingError(f"{problem} (--address {address}): {error}") from error
    try:
        yield
        time.sleep(_OUTPUT_SECONDS)  # else the last lines of the ranks would be lost
    finally:
        ray.shutdown()


def _no_ray(address: str, why: str) -> ConfigError:
    cure = f"start one with `ray start --head`, or use --address {LOCAL}"
    return ConfigError(f"there is no Ray at --address {address} ({why}): {cure}")


def check_folder(output_dir: str) -> None:
    """Raises ConfigError when a run's files would go where `ray job submit` keeps, and later deletes, the code."""
    if not os.path.isabs(output_dir) and "/runtime_resources/working_dir_files/" in os.getcwd() + "/":
        raise ConfigError(
            f"output_dir: {output_dir} would lie in the copy of the working directory that Ray makes for a submitted "
            "job and deletes after it: give an absolute one, on a file system that all machines share"
        )


def machines() -> list[Machine]:
    """The machines that are alive."""
    import ray

    return [
        Machine(
            node=node["NodeID"],
            address=node["NodeManagerAddress"],
            cpus=node["Resources"].get("CPU", 0),
            gpus=node["Resources"].get("GPU", 0),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


@dataclass(frozen=True, kw_only=True)
class Reservation:
    """Devices that Ray reserves for the ranks of a job."""

    group: Any
    """The placement group."""
    ranks: list[RankPlacement]
    on_gpus: bool
    """Each rank has a GPU; else one CPU of Ray's count."""
    cpus: Mapping[str, float]
    """CPUs of each machine, by its id."""
    roles: Mapping[str, list[RankPlacement]] = field(default_factory=dict)
    """Ranks of the roles on separate devices."""


@contextlib.contextmanager
def reserve_devices(
    count: int,
    tp_size: int,
    minutes: float,
    stopped: Callable[[], bool],
    roles: Mapping[str, tuple[int, int]] | None = None,
) -> Iterator[Reservation | None]:
    """Reserves devices for `count` ranks and the `roles` in one placement group, for the block.

    One group for all, because two jobs that reserve piece by piece could wait for each other. Each tensor-parallel
    group lies on one machine where a machine is large enough; else a notice says so. Prints notices while it waits.
    Yields None when `stopped()` turned true. Raises RollBatchingError after `minutes` without devices.

    Args:
        count: ranks of the job.
        tp_size: of its tensor-parallel groups.
        minutes: limit of the wait for devices that are in use or not up yet.
        stopped: ends the wait.
        roles: ranks and tensor-parallel size of roles on separate devices.
    """
    import ray

    cluster = machines()
    on_gpus = any(machine.gpus for machine in cluster)
    largest = max(machine.capacity(on_gpus) for machine in cluster)
    groups = {"": (count, tp_size), **(roles or {})}
    sizes = {name: bundle_size(tp, largest) for name, (_, tp) in groups.items()}
    for name, (_, tp) in groups.items():
        if sizes[name] < tp:
            whose = f" of {name}" if name else ""
            problem = f"no machine of this Ray has room for a tensor-parallel group{whose} of {tp}"
            notify(f"{problem}: it spans machines, {sizes[name]} each")
    bundles = [sizes[name] for name, (ranks, _) in groups.items() for _ in range(ranks // sizes[name])]
    devices = [{"CPU": size, "GPU": size} if on_gpus else {"CPU": size} for size in bundles]
    group = ray.util.placement_group(devices, strategy="PACK")
    try:
        if _wait_until_ready(group, sum(bundles), on_gpus, minutes, stopped):
            nodes = ray.util.placement_group_table(group)["bundles_to_node_id"]
            cpus = {machine.node: machine.cpus for machine in machines()}
            placements, first = {}, 0
            for name, (ranks, _) in groups.items():
                bundle_nodes = [nodes[first + bundle] for bundle in range(ranks // sizes[name])]
                placements[name] = [
                    replace(placement, bundle=first + placement.bundle)
                    for placement in place_ranks(bundle_nodes, sizes[name])
                ]
                first += len(bundle_nodes)
            yield Reservation(group=group, ranks=placements.pop(""), on_gpus=on_gpus, cpus=cpus, roles=placements)
        else:
            yield None
    finally:
        ray.util.remove_placement_group(group)


def _wait_until_ready(group: Any, count: int, on_gpus: bool, minutes: float, stopped: Callable[[], bool]) -> bool:
    """Waits for the placement group of `count` devices; False when `stopped`. Raises after `minutes`."""
    started, next_notice = time.monotonic(), _SECONDS_BEFORE_NOTICE
    while not stopped():
        if group.wait(0.5):
            return True
        waited = time.monotonic() - started
        if waited < min(next_notice, 60 * minutes):
            continue
        kind = "GPUs" if on_gpus else "CPUs"
        present = ", ".join(f"{machine.capacity(on_gpus)} on {machine.address}" for machine in machines())
        wanted = f"room for {count} ranks ({kind}: one each), and this Ray's machines have {present} in all"
        if waited > 60 * minutes:
            raise RollBatchingError(
                f"there was no {wanted}, for {minutes:g} minutes (actor_train.backend_timeout): end what uses them, "
                "add machines, or use fewer ranks (--nproc, device_mapping)"
            )
        notify(f"waiting {waited:.0f} s so far for {wanted}, for {minutes:g} minutes at most")
        next_notice *= 2
    return False
