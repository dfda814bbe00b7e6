"""Files with rates of a cluster, written by `roll-batching doctor --calibrate` or by hand."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from roll_batching.errors import ConfigError, PlanError
from roll_batching.planning.pack_times import Cluster
from roll_batching.settings.yaml_values import YamlFaults, read_values

WRITTEN_BY = "roll-batching doctor --calibrate"
_KEYS = tuple(field.name for field in fields(Cluster))
_SECTIONS = ("written_by", "date", "device", "hosts", "slow_ranks", "spread", "measured", "model", "versions")
"""Sections beside `cluster`, by which a file says how its rates were measured."""


@dataclass(frozen=True, kw_only=True)
class ClusterFile:
    """The rates of a file, and where they were measured."""

    path: str
    rates: Mapping[str, Any]
    """Fields of `Cluster`; some may be left out."""
    date: str | None
    device: str | None
    """Name of the devices that were measured; None in a file written by hand."""

    def __str__(self) -> str:
        if self.device is None:
            return f"{self.path}, whose rates are yours"
        left = [key for key in _KEYS if key not in self.rates and key != "slice_tokens"]
        estimates = f" (estimates: {', '.join(left)})" if left else ""
        return f"{self.path}, whose rates were measured on {self.date} on {self.device}{estimates}"


def read_cluster_file(path: str | Path) -> ClusterFile:
    """Reads rates from the top level of the YAML file at `path`, or from its section `cluster`.

    Raises `ConfigError`, which names file and key, for a file without rates, unknown keys, and values in another unit.
    """
    cure = f"`{WRITTEN_BY} {path}` writes one"
    try:
        if not Path(path).is_file():
            raise ConfigError(f"{path}: no such file of rates; check its path, or measure: {cure}")
        data, _ = read_values(Path(path).read_text("utf-8-sig"))
    except YamlFaults as error:
        fault = error.faults[0]
        key = f"{'.'.join(map(str, fault.path))} " if fault.path else ""
        raise ConfigError(f"{path}, line {fault.line}: {key}{fault.message}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); {cure}") from None
    if not isinstance(data, dict | None):
        raise ConfigError(f"{path} must hold keys and values, such as matmul_rate: 5.9e14; {cure}")
    rates, other = data, {}
    if data and "cluster" in data:
        rates, other = data["cluster"], {key: value for key, value in data.items() if key != "cluster"}
    if unknown := [key for key in other if key not in _SECTIONS]:
        raise ConfigError(f"{path}: {unknown[0]!r} stands beside `cluster`: write rates inside that section")
    if not isinstance(rates, dict) or not rates:
        raise ConfigError(f"{path} names no rates of a cluster: write for example matmul_rate: 5.9e14; {cure}")
    with_rates(Cluster(), rates, str(path))
    date, device = (str(other[key]) if key in other else None for key in ("date", "device"))
    return ClusterFile(path=str(path), rates=rates, date=date, device=device)


def with_rates(cluster: Cluster, rates: Mapping[str, Any], where: str) -> Cluster:
    """`cluster` with other `rates`. Raises `ConfigError`, which begins with `where`, for unknown keys and units."""
    for key in rates:
        if key not in _KEYS:
            guess = difflib.get_close_matches(str(key), _KEYS, n=1)
            hint = f"did you mean {guess[0]!r}?" if guess else f"known are {', '.join(_KEYS)}"
            raise ConfigError(f"{where}: a cluster has no field {key!r}; {hint}")
    try:
        return replace(cluster, **rates)
    except PlanError as error:
        raise ConfigError(f"{where}: {error}") from None
