"""Rules of LoRA adapters (`lora_target`) over several keys and roles."""

from __future__ import annotations

from collections.abc import Iterator

from roll_batching.jobs.config.critic_rules import uses_critic
from roll_batching.jobs.config.diagnostics import Notice, Problem
from roll_batching.jobs.config.job_keys import JobKeys
from roll_batching.jobs.config.layout_rules import differing_keys
from roll_batching.jobs.config.objective_rules import wants_reference
from roll_batching.settings.adapter_problems import adapter_problems as problems_of_model

ADAPTER_KEYS = ("lora_target", "lora_rank", "lora_alpha")
"""Keys that rollouts and reference take from actor_train."""


def adapter_problems(job: JobKeys) -> Iterator[Problem]:
    """Problems of a job whose policy trains adapters, and of adapters in other roles."""
    model = job.actor_train.model_args
    path = ("actor_train", "model_args", "lora_target")
    for name, role in job.roles.items():
        if name in ("actor_infer", "reference"):
            for key in ADAPTER_KEYS:
                if getattr(role.model_args, key) != getattr(model, key):
                    text = "differs from actor_train's, whose adapters this role takes; leave it out here"
                    yield Problem((name, "model_args", key), text)
        elif name != "actor_train" and role.model_args.lora_target is not None:
            text = "is set, and actor_train alone trains adapters for now; leave it out here"
            yield Problem((name, "model_args", "lora_target"), text)
    if model.lora_target is None:
        return
    layout = job.actor_train.strategy_args.strategy_config
    if model.architecture is not None:
        for problem in problems_of_model(model, model.architecture, layout.transformer_impl, layout):
            yield Problem(path, f"is set, and {problem}; leave it out")
    if uses_critic(job):
        yield Problem(path, "is set, and adapters are not supported with a critic (gae) for now; leave it out")
    if job.reference is None or not wants_reference(job):
        return
    if job.own_devices("reference") is not None:
        text = "differs from actor_train's, and with lora_target the reference is the policy without its adapters"
        yield Problem(("reference", "device_mapping"), f"{text}; leave it out")
    else:
        for key in differing_keys(job.reference, job.actor_train):
            text = "differs from actor_train's, and with lora_target the reference is the policy without its adapters"
            yield Problem(("reference", "strategy_args", "strategy_config", key), f"{text}; leave it out here")
    if job.warmup is not None:
        text = (
            "is given, and with lora_target the reference would be the model before the warm-up; train the warm-up "
            "in a separate job (task: sft) and start from its export, or train without a reference"
        )
        yield Problem(("warmup",), text)


def adapter_notices(job: JobKeys) -> Iterator[Notice]:
    """The notice that a reference lacks the adapters from which the policy starts."""
    if job.actor_train.model_args.adapter_name_or_path is None or job.reference is None or not wants_reference(job):
        return
    text = "the reference is the model without these adapters, not the policy as it starts. For that, start from a "
    text += "model directory with the adapters added (roll-batching export)"
    yield Notice(("actor_train", "model_args", "adapter_name_or_path"), text)
