"""How many processes a job starts, and on which devices."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from roll_batching.errors import ConfigError
from roll_batching.jobs.config import JobConfig
from roll_batching.jobs.config.engine_rules import starts_servers


def process_count(config: JobConfig, nproc: int | None) -> int:
    """Processes to start: `nproc` when given, else what device_mapping names, else 1.

    Raises ConfigError when they do not divide into copies of the parallel layout.
    """
    count = nproc or config.world_size or 1
    config.dp_size(count)
    return count


_CROWDED = 2
"""Processes per processor beyond which a machine without GPUs is said to be too small."""


def crowding(count: int, processors: int) -> str | None:
    """What to say before `count` processes start on a machine without GPUs; None where it has room for them."""
    if count <= _CROWDED * processors:
        return None
    return (
        f"{count} processes start here, as many as actor_train.device_mapping or --nproc asks for, on {processors} "
        f"processors and no GPU: they will be very slow, and may not fit into memory; --nproc {processors} starts fewer"
    )


def choose_devices(mapping: Sequence[int] | None, count: int, gpus: int, *, forced: bool) -> list[int]:
    """The GPUs that `count` processes use, of `gpus` that the machine has; empty on a machine without.

    `forced` says that the count was given on the command line: then devices that the machine lacks are
    replaced by its first ones. Raises ConfigError when there are too few.
    """
    if gpus == 0:
        return []
    wanted = list(mapping or range(count))[:count]
    if forced and (len(wanted) < count or max(wanted) >= gpus):
        wanted = list(range(count))
    if max(wanted) >= gpus:
        have = "1 GPU" if gpus == 1 else f"{gpus} GPUs"
        asked = f"--nproc asks for {count}" if forced else f"actor_train.device_mapping names device {max(wanted)}"
        raise ConfigError(
            f"{asked}, but this machine has {have} (numbered from 0); "
            f"use --nproc {gpus} or fewer, or another device_mapping"
        )
    return wanted


def visible_devices(devices: Sequence[int], environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variable that shows exactly `devices` to the workers; they count within what is visible already.

    Raises ConfigError for one that is not visible.
    """
    if not devices:
        return {}
    before = environment.get("CUDA_VISIBLE_DEVICES", "")
    names = [name.strip() for name in before.split(",") if name.strip()]
    if names and max(devices) >= len(names):
        raise ConfigError(
            f"device {max(devices)} is not there: CUDA_VISIBLE_DEVICES={before} shows {len(names)}, numbered from 0; "
            "name another one in device_mapping, or make it visible"
        )
    chosen = [names[device] if names else str(device) for device in devices]
    return {"CUDA_VISIBLE_DEVICES": ",".join(chosen)}


def devices_of_roles(config: JobConfig, chosen: Sequence[int], gpus: int) -> list[int]:
    """The GPUs of roles that do not share those that were `chosen` for the ranks; empty on a machine without.

    Raises ConfigError for one that is not among the `gpus` of the machine, or that is chosen already.
    """
    found: list[int] = []
    for name in config.roles if gpus else ():
        own = config.own_devices(name) or ()
        if missing := [device for device in own if device >= gpus]:
            have = "1 GPU" if gpus == 1 else f"{gpus} GPUs"
            raise ConfigError(
                f"{name}.device_mapping names device {missing[0]}, but this machine has {have} (numbered from 0); "
                "use another device_mapping"
            )
        if taken := sorted(set(own) & set(chosen)):
            raise ConfigError(
                f"--nproc asks for {len(chosen)} processes, which take device {taken[0]} of {name}.device_mapping: "
                "name other devices there, or start as many processes as actor_train.device_mapping names"
            )
        found += [device for device in own if device not in found]
    return found


def role_devices(config: JobConfig, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables that name the devices of roles that have their own, and of the servers that the job starts.

    Raises ConfigError where a role names one that is not there.
    """
    from roll_batching.jobs.processes.world import DEVICES

    return {
        DEVICES[name]: visible_devices(devices, environment)["CUDA_VISIBLE_DEVICES"]
        for name, devices in _numbered(config).items()
        if DEVICES[name] not in environment  # else the launcher has said it, who saw all devices
    }


def devices_under_torchrun(config: JobConfig, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variable that shows this machine's ranks those of actor_train, where roles have others; else nothing.

    Raises ConfigError where ranks are on several machines: roles of their own are processes on that of rank 0.
    """
    own = next((name for name in config.roles if config.own_devices(name) is not None), None)
    if own is None or config.actor_train.device_mapping is None:
        return {}
    if environment.get("LOCAL_WORLD_SIZE", "") not in ("", environment.get("WORLD_SIZE")):
        raise ConfigError(
            f"{own}.device_mapping names devices of its own, which are sought on the machine of rank 0, and torchrun "
            "has started ranks on several: leave it out, and the role shares those of actor_train; or let engines "
            "sample, on servers of your own (actor_infer.engine_args.urls)"
        )
    return visible_devices(config.actor_train.device_mapping, environment)


def _numbered(config: JobConfig) -> dict[str, tuple[int, ...]]:
    """The devices of each role whose processes rank 0 starts on devices that its configuration numbers."""
    found = {name: own for name in config.roles if (own := config.own_devices(name)) is not None}
    if starts_servers(config) and config.actor_infer.device_mapping is not None:
        found["actor_infer"] = config.actor_infer.device_mapping
    return found
