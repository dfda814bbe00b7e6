"""Caps of micro-batches that a job leaves to its device's memory: `auto`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from roll_batching.settings.batching import PASSES_OF_ROLES, RoleBatching
from roll_batching.settings.fields import MOST_TOKENS, AlsoInFile, Settings, Switch, setting

_BYTES = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


def parse_bytes(value: Any) -> Any:
    """Bytes of a text such as 80GiB; other values are returned unchanged. Raises ValueError."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
    if match is None or match[2].upper() not in _BYTES:
        raise ValueError(f"{value!r} is not a size: write for example 80GiB")
    return int(float(match[1]) * _BYTES[match[2].upper()])


def auto_caps(roles: Mapping[str, RoleBatching]) -> list[str]:
    """Dotted paths of the caps of `roles` that are `auto`, those of training first, in the order of the roles."""
    paths = [
        f"{name}.{key}"
        for kind in ("train", "infer")
        for name, role in roles.items()
        if kind in PASSES_OF_ROLES[name] and (key := role.cap_key(kind)) is not None and role.cap_at(key) == "auto"
    ]
    return list(dict.fromkeys(paths))


def longest_sample(job: Any) -> int:
    """Tokens of the longest sequence that the job accepts."""
    return int(job.sequence_length or (job.prompt_length + (job.response_length or 0)))


def smallest_cap(job: Any) -> int:
    """Tokens of a micro-batch of one longest sample (of both responses, under `dpo`), rounded up as plans may do."""
    layout = job.actor_train.strategy_args.strategy_config
    multiple = max(64, 2 * int(layout.cp_size * layout.tensor_model_parallel_size))
    return (2 if job.task == "dpo" else 1) * -(-longest_sample(job) // multiple) * multiple


_READ_IF = {"device_memory_limit": Switch(lambda job: auto_caps(job.roles), "no cap of micro-batches is auto")}


class MemoryKeys(Settings, read_if=_READ_IF):
    """Keys of a job that bound the memory of its devices."""

    device_memory_limit: Annotated[int | None, AlsoInFile(str, parse_bytes)] = setting(
        None,
        help="Memory of a device for caps that are auto: bytes, or a text such as 60GiB. Default: what is free on the "
        "GPU.",
        gt=0,
    )


def with_value(settings: Any, path: str, value: Any) -> Any:
    """Copy of pydantic settings with `value` at a dotted path."""
    first, _, rest = path.partition(".")
    return settings.model_copy(update={first: with_value(getattr(settings, first), rest, value) if rest else value})


def with_caps(job: Any, caps: Mapping[str, int]) -> Any:
    """Copy of a job with `caps`, by dotted path."""
    for path, value in caps.items():
        job = with_value(job, path, value)
    return job


def with_open_caps(job: Any) -> Any:
    """Copy of a job whose auto caps hold every sample, for checks before they are resolved."""
    return with_caps(job, dict.fromkeys(auto_caps(job.roles), MOST_TOKENS))
