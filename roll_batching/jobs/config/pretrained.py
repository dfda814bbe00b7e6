"""Checks of a job's model directory: supported fields, and agreement with `model_args.architecture`."""

from __future__ import annotations

from collections.abc import Iterator

from roll_batching.errors import ConfigError
from roll_batching.huggingface.directory import directory_of
from roll_batching.jobs.config.diagnostics import KeyPath, Problem
from roll_batching.jobs.config.job_keys import JobKeys
from roll_batching.jobs.config.model_rules import mtp_problems
from roll_batching.settings.fields import Settings
from roll_batching.settings.model import ArchitectureConfig, describe_model

TRAINED_WITH = (
    "hidden_dropout", "init_std", "aux_loss_coeff", "z_loss_coeff", "router_bias_update_rate", "mtp_num_layers",
)  # fmt: skip
"""Settings of an architecture that concern training alone: they may differ from the model directory's."""


def model_problems(job: JobKeys) -> Iterator[Problem]:
    """Unsupported fields of the `config.json` of a job's models, settings that differ from it, and its heads."""
    yield from mtp_problems(job)
    reported: list[tuple[object, ...]] = []
    for role, worker in job.roles.items():
        name = worker.model_args.model_name_or_path
        family = worker.model_args.family
        if name is None:
            if family is not None and (name, family) not in reported:
                reported.append((name, family))
                text = "has no effect without a model directory: set model_name_or_path, or leave it out"
                yield Problem((role, "model_args", "family"), text)
            continue
        found = describe_model(name, family)
        if found is None:  # reported when the job starts (`missing_model`): another machine may have the directory
            continue
        given = worker.model_args.architecture
        if (name, given) in reported:
            continue
        reported.append((name, given))
        if found.problems:
            yield Problem(_place(job, role, name), f"{name}: {'; '.join(found.problems)}")
        elif given is not None:
            path = (role, "model_args", "architecture")
            yield from _differences(given, ArchitectureConfig.model_validate(found.architecture), path, name)


def missing_model(job: JobKeys, role: str, name: str) -> list[Problem]:
    """The problem that the model directory `name` of `role` does not exist, or none."""
    try:
        directory_of(name)
    except ConfigError as error:
        return [Problem(_place(job, role, name), str(error))]
    return []


def _place(job: JobKeys, role: str, name: str) -> KeyPath:
    return ("pretrain",) if job.pretrain == name else (role, "model_args", "model_name_or_path")


def _differences(given: Settings, found: Settings, path: KeyPath, name: str) -> Iterator[Problem]:
    for key in type(given).model_fields:
        here, there = getattr(given, key), getattr(found, key)
        if here == there or key in TRAINED_WITH:
            continue
        if isinstance(here, Settings) and isinstance(there, Settings):
            yield from _differences(here, there, (*path, key), name)
        else:
            text = f"is {here}, and config.json of {name} says {there}; leave it out here"
            yield Problem((*path, key), text)
