"""Rules of FP8 training (`strategy_config.fp8`) over several keys and roles."""

from __future__ import annotations

from collections.abc import Iterator

from roll_batching.jobs.config.diagnostics import Problem
from roll_batching.jobs.config.engine_rules import uses_engine
from roll_batching.jobs.config.job_keys import JobKeys
from roll_batching.jobs.config.layout_rules import builds_sampling_model, policy_cannot_sample, sampling_role
from roll_batching.jobs.config.supervised import supervised
from roll_batching.jobs.config.worker import WorkerConfig
from roll_batching.settings.fp8 import layout_problems, model_problems


def fp8_problems(job: JobKeys) -> Iterator[Problem]:
    """Problems of roles that compute in FP8, or give keys of it; those of keys taken from actor_train only there."""
    trained = set(_role(job.actor_train))
    for name, role in job.roles.items():
        if role.strategy_args.runs_on_megatron and (name != "actor_infer" or builds_sampling_model(job)):
            for path, text in _role(role):
                if name == "actor_train" or (path, text) not in trained:
                    yield Problem((name, *path), text)


def _role(role: WorkerConfig) -> Iterator[tuple[tuple[str, ...], str]]:
    """(path in the role, problem)."""
    layout, model = role.strategy_args.strategy_config, role.model_args
    found = list(layout_problems(layout))
    if layout.fp8 is not None:
        if model.architecture is not None:
            found += model_problems(layout, model.architecture)
        if model.dtype not in ("auto", "bf16"):
            text = f"is {model.dtype}, and strategy_config.fp8 needs weights in bf16; set bf16, or leave it out"
            yield ("model_args", "dtype"), text
        if model.trains_part:
            found.append(("fp8", "is not supported with lora_target or freeze_module_prefix; leave it out"))
    for key, text in found:
        yield ("strategy_args", "strategy_config", key), text


def models_that_cannot_sample(job: JobKeys) -> Iterator[Problem]:
    """Sizes and FP8 of models that would sample: without an engine, which also answers held-out prompts."""
    yield from policy_cannot_sample(job)
    sampler = sampling_role(job)
    fp8 = sampler.strategy_args.strategy_config.fp8
    if fp8 is None or supervised(job) or not job.max_steps:
        return
    path = ("strategy_args", "strategy_config", "fp8")
    engine = "set actor_infer.strategy_args.strategy_name to sglang or vllm, with `pretrain`"
    if not uses_engine(job):
        name = "actor_infer" if sampler is job.actor_infer else "actor_train"
        yield Problem((name, *path), f"is {fp8}, and a model does not sample in FP8; {engine}")
