"""Checks that a job's models can be computed and saved here, before they are built."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import TYPE_CHECKING

from roll_batching.errors import ConfigError
from roll_batching.jobs.config import JobConfig, WorkerConfig
from roll_batching.jobs.config.rl_rules import uses_critic
from roll_batching.settings import MegatronConfig

if TYPE_CHECKING:
    import torch

_KERNEL_KEYS = ("transformer_impl", "attention_backend", "fp8", "recompute_modules", "use_precision_aware_optimizer")
"""Keys without which every model can be computed on the CPU."""


def check_capabilities(job: JobConfig, device: torch.device) -> None:
    """Raises `ConfigError` with role, reason and remedy of everything that cannot run on `device`.

    The launcher calls it on machines without GPUs, where it need not import Megatron for most jobs. Ranks call it
    before engines and models start.
    """
    problems = [f"{name}: {problem}" for name, role in _trained(job) for problem in _problems(role, device)]
    if job.save_steps:
        problems += _saving_problems(job)
    if problems:
        raise ConfigError("the job cannot run here: " + "; ".join(problems))


def _trained(job: JobConfig) -> Iterator[tuple[str, WorkerConfig]]:
    """Names and settings of the roles that train."""
    yield "actor_train", job.actor_train
    if job.critic is not None and uses_critic(job):
        yield "critic", job.critic


def _problems(role: WorkerConfig, device: torch.device) -> list[str]:
    """Why the model of `role` cannot be built and trained on `device`."""
    megatron = role.strategy_args.strategy_config
    fields = MegatronConfig.model_fields
    is_plain = all(getattr(megatron, key) == fields[key].default for key in _KERNEL_KEYS)
    if device.type == "cpu" and is_plain and not role.training_args.uses_muon:
        return []
    from roll_batching.modeling.build_problems import build_problems
    from roll_batching.modeling.builder import resolve_dtype
    from roll_batching.modeling.kernels import choose_kernels
    from roll_batching.modeling.requirements import optimizer_problems

    architecture = role.model_args.architecture_to_build(megatron.mtp_num_layers)
    dtype = resolve_dtype(role.model_args.dtype, device)
    problems = build_problems(
        architecture,
        megatron,
        choose_kernels(megatron, architecture, device),
        device=device,
        dtype=dtype,
        tp_size=megatron.tensor_model_parallel_size,
        cp_size=megatron.cp_size,
        value_head=role.model_args.value_head,
    )
    return [*problems, *optimizer_problems(role.training_args, megatron, device, dtype)]


def _saving_problems(job: JobConfig) -> Iterator[str]:
    if importlib.util.find_spec("psutil") is None:
        yield "save_steps needs psutil, which Megatron's checkpoint writer uses: pip install psutil"
    for name, role in _trained(job):
        if role.strategy_args.strategy_config.use_precision_aware_optimizer:
            yield (
                f"{name}: the optimizer state of use_precision_aware_optimizer is not saved: leave it out, or set "
                "save_steps: 0"
            )
