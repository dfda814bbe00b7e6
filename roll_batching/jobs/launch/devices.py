"""Chooses a job's resources on this machine: number of processes, GPUs of ranks and roles, limit of open files."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Mapping, Sequence

from roll_batching.errors import ConfigError, RollBatchingError
from roll_batching.jobs.config import JobConfig
from roll_batching.jobs.config.engine_rules import starts_servers
from roll_batching.jobs.processes.child_process import ROLE_DEVICES

_PROCESSES_PER_CPU = 2
"""A machine without GPUs is oversubscribed beyond this."""


def process_count(config: JobConfig, nproc: int | None) -> int:
    """Number of processes to start: `nproc` when given, else of the devices in device_mapping, else 1.

    Raises ConfigError when it does not divide by the parallel layout.
    """
    count = nproc or config.world_size or 1
    config.dp_size(count)  # raises when the count does not fit the layout
    return count


def oversubscription_warning(count: int, processors: int) -> str | None:
    """A warning when `count` processes are too many for the CPUs of a machine without GPUs; else None."""
    if count <= _PROCESSES_PER_CPU * processors:
        return None
    return (
        f"{count} processes start here, as many as actor_train.device_mapping or --nproc asks for, on {processors} "
        f"processors and no GPU: they will be very slow, and may not fit into memory; --nproc {processors} starts fewer"
    )


def choose_devices(mapping: Sequence[int] | None, count: int, gpus: int, *, forced: bool) -> list[int]:
    """The GPUs of `count` processes on a machine with `gpus`; empty on a machine without.

    `forced`: the count is from the command line, and mapped devices that the machine lacks are replaced by its first
    ones. Raises ConfigError when there are too few GPUs.
    """
    if gpus == 0:
        return []
    wanted = list(mapping or range(count))[:count]
    if forced and (len(wanted) < count or max(wanted) >= gpus):
        wanted = list(range(count))
    if max(wanted) >= gpus:
        asked = f"--nproc asks for {count}" if forced else f"actor_train.device_mapping names device {max(wanted)}"
        raise ConfigError(
            f"{asked}, but this machine has {_gpus(gpus)}; use --nproc {gpus} or fewer, or another device_mapping"
        )
    return wanted


def visible_devices(devices: Sequence[int], environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns CUDA_VISIBLE_DEVICES for `devices`, which are numbered among the devices visible now.

    Raises ConfigError for a device that is not visible.
    """
    if not devices:
        return {}
    current = environment.get("CUDA_VISIBLE_DEVICES", "")
    names = [name.strip() for name in current.split(",") if name.strip()]
    if names and max(devices) >= len(names):
        raise ConfigError(
            f"device {max(devices)} is not there: CUDA_VISIBLE_DEVICES={current} shows {len(names)}, numbered from 0; "
            "name another one in device_mapping, or make it visible"
        )
    chosen = [names[device] if names else str(device) for device in devices]
    return {"CUDA_VISIBLE_DEVICES": ",".join(chosen)}


def role_gpus(config: JobConfig, rank_devices: Sequence[int], gpus: int) -> list[int]:
    """The GPUs of roles that have their own, none of which is in `rank_devices`; empty on a machine without `gpus`.

    Raises ConfigError for a device that the machine lacks or that a rank uses.
    """
    devices: list[int] = []
    for name in config.roles if gpus else ():
        role_devices = config.own_devices(name) or ()
        if missing := [device for device in role_devices if device >= gpus]:
            raise ConfigError(
                f"{name}.device_mapping names device {missing[0]}, but this machine has {_gpus(gpus)}; "
                "use another device_mapping"
            )
        if shared := sorted(set(role_devices) & set(rank_devices)):
            raise ConfigError(
                f"--nproc asks for {len(rank_devices)} processes, which take device {shared[0]} of "
                f"{name}.device_mapping: name other devices there, or start as many processes as "
                "actor_train.device_mapping names"
            )
        devices += [device for device in role_devices if device not in devices]
    return devices


def role_device_variables(config: JobConfig, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables with the devices of roles that have their own, and of the engine servers that the job starts.

    Raises ConfigError for a device that is not visible.
    """
    return {
        ROLE_DEVICES[name]: visible_devices(devices, environment)["CUDA_VISIBLE_DEVICES"]
        for name, devices in _mapped_devices(config).items()
        if ROLE_DEVICES[name] not in environment  # else set by the launcher, which sees all devices
    }


def devices_under_torchrun(config: JobConfig, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES for ranks on this machine where roles have other devices; else empty.

    Raises ConfigError when ranks are on several machines: rank 0 starts the role's processes on its machine only.
    """
    role_name = next((name for name in config.roles if config.own_devices(name) is not None), None)
    if role_name is None or config.actor_train.device_mapping is None:
        return {}
    if environment.get("LOCAL_WORLD_SIZE", "") not in ("", environment.get("WORLD_SIZE")):
        raise ConfigError(
            f"{role_name}.device_mapping names separate devices, which must be on the machine of rank 0, and torchrun "
            "has started ranks on several: leave it out, and the role shares those of actor_train; or let engines "
            "sample, on servers of your own (actor_infer.engine_args.urls)"
        )
    return visible_devices(config.actor_train.device_mapping, environment)


def _mapped_devices(config: JobConfig) -> dict[str, tuple[int, ...]]:
    """Device numbers of each role whose processes rank 0 starts."""
    devices = {name: mapped for name in config.roles if (mapped := config.own_devices(name)) is not None}
    if starts_servers(config) and config.actor_infer.device_mapping is not None:
        devices["actor_infer"] = config.actor_infer.device_mapping
    return devices


def _gpus(count: int) -> str:
    return f"{count} GPU{'' if count == 1 else 's'} (numbered from 0)"


# ---- open files


NEEDED = 256
"""Open files that a rank needs. Of two ranks each opens 125, of four 152: sockets between ranks, pipes, files."""
_WANTED = 65_536


def raise_open_files_limit() -> None:
    """Increases this process's limit, which its children inherit. Raises RollBatchingError when it stays too low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = hard == resource.RLIM_INFINITY
    wanted = _WANTED if unlimited else min(hard, _WANTED)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    if soft != resource.RLIM_INFINITY and soft < NEEDED:
        raise RollBatchingError(
            f"ulimit -n is {soft}: a process here may open {soft} files and sockets, and each of a job's processes "
            f"needs {NEEDED} or more. Raise it (ulimit -n 4096; its hard limit, ulimit -Hn, may need an administrator)"
        )
