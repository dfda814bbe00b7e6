"""Clusters by name, or from a YAML file with the fields of `Cluster`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from roll_batching.errors import ConfigError, PlanError
from roll_batching.jobs.config.diagnostics import nearest
from roll_batching.jobs.config.yaml_source import read_yaml
from roll_batching.planning.pack_times import Cluster

CLUSTERS: Mapping[str, Cluster] = {
    "h100": Cluster(),
    "a100": Cluster(
        matmul_rate=0.60 * 312e12, attention_rate=0.42 * 312e12, node_bandwidth=200e9, network_bandwidth=21e9
    ),
}
"""Estimates, not measurements. a100: the H100's shares of the peak rates of its datasheet, 200 Gb/s per device."""


def read_cluster(name: str) -> Cluster:
    """The cluster `name`, or of the YAML file `name`, whose fields replace those of h100.

    The fields stand at the top of the file, or under `cluster`. Raises `ConfigError` for unknown names and for values
    in another unit.
    """
    if name in CLUSTERS:
        return CLUSTERS[name]
    if Path(name).suffix.lower() not in (".yaml", ".yml"):
        raise ConfigError(
            f"--cluster {name!r} is not known: choose one of {', '.join(CLUSTERS)}, or a YAML file (.yaml) with rates "
            f"such as matmul_rate: 5.9e14"
        )
    source = read_yaml(name)
    section = source.data
    if set(section) == {"cluster"}:
        section = section["cluster"]
    if not isinstance(section, dict) or not section:
        raise ConfigError(f"{name} names no rates of a cluster: write for example matmul_rate: 5.9e14")
    return cluster_of(section, name)


def cluster_of(values: Mapping[str, Any], where: str) -> Cluster:
    """The cluster with these fields, the others from h100. Raises `ConfigError`."""
    known = [field.name for field in fields(Cluster)]
    for key in values:
        if key not in known:
            guess = nearest(str(key), known)
            hint = f"did you mean {guess!r}?" if guess else f"known are {', '.join(known)}"
            raise ConfigError(f"{where}: a cluster has no field {key!r}; {hint}")
    try:
        return Cluster(**values)
    except PlanError as error:
        raise ConfigError(f"{where}: {error}") from None
