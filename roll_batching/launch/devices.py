"""How many processes a job starts, and on which devices."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from roll_batching.config import JobConfig
from roll_batching.config.engine_rules import starts_servers
from roll_batching.errors import ConfigError


def process_count(config: JobConfig, nproc: int | None) -> int:
    """Processes to start: `nproc` when given, else what device_mapping names, else 1.

    Raises ConfigError when they do not divide into copies of the parallel layout.
    """
    count = nproc or config.world_size or 1
    config.dp_size(count)
    return count


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


def sampler_device(config: JobConfig, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variable that names the devices of the sampler, or of the servers that the job starts.

    Nothing where that is actor_train's first one. Raises ConfigError where actor_infer names one that is not there.
    """
    own, shared = config.actor_infer.device_mapping, config.actor_train.device_mapping
    sampler = config.asynchronous and own != shared and config.actor_infer.strategy_args.runs_on_megatron
    if own is None or not (sampler or starts_servers(config)):
        return {}
    from roll_batching.rl.sampler import DEVICE

    if DEVICE in environment:  # the launcher has said it, who saw all devices
        return {}
    return {DEVICE: visible_devices(own, environment)["CUDA_VISIBLE_DEVICES"]}
