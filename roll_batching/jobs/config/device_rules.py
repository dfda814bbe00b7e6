"""Rules for roles on separate devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from roll_batching.errors import LayoutError
from roll_batching.jobs.config.diagnostics import Problem
from roll_batching.jobs.config.job_keys import JobKeys
from roll_batching.jobs.config.layout_rules import sampling_problems, size_problems
from roll_batching.jobs.config.supervised import supervised


def device_problems(job: JobKeys) -> Iterator[Problem]:
    """Problems of the devices and layouts of roles that do not share actor_train's devices."""
    for name in job.roles:
        if (own := job.own_devices(name)) is not None:
            yield from _role_problems(job, name, own)
    sampler, reference = job.own_devices("actor_infer"), job.own_devices("reference")
    if sampler is not None and reference is not None and _overlap_partly(reference, sampler):
        text = "names some of actor_infer's devices: two roles share all of them, in the same order, or none"
        yield Problem(("reference", "device_mapping"), text)


def _role_problems(job: JobKeys, name: str, own: Sequence[int]) -> Iterator[Problem]:
    role, train, where = job.roles[name], job.actor_train.device_mapping, (name, "device_mapping")
    if supervised(job):
        text = f"differs from actor_train's, but all roles of task: {job.task} run on the same devices"
        yield Problem(where, f"{text}; leave it out here")
        return
    if train is None:
        text = "names devices, but actor_train names none that they could differ from"
        yield Problem(where, f"{text}; name those in actor_train.device_mapping")
    elif _overlap_partly(own, train):
        text = "names some of actor_train's devices: a role shares all of them, in the same order, or none"
        yield Problem(where, f"{text}; leave it out here to share them, or name others")
    problems = list(size_problems(name, role))
    yield from problems
    layout, sizes = role.strategy_args.strategy_config, (name, "strategy_args", "strategy_config")
    if not problems:
        try:
            layout.parallel_dims(len(own))
        except LayoutError as error:
            yield Problem(sizes, str(error))
    if name == "actor_infer":
        yield from sampling_problems(name, role, job.actor_train)


def _overlap_partly(own: Sequence[int], other: Sequence[int]) -> bool:
    return tuple(own) != tuple(other) and bool(set(own) & set(other))
