"""ROLL's own configuration classes and functions, run in a process of their own from a checkout of it.

    python tests/tools/conversion/roll_original.py CHECKOUT defaults      fields and defaults of its classes, as JSON
    python tests/tools/conversion/roll_original.py CHECKOUT figures       JSON on standard input, figures as JSON

Nothing of ROLL's needs to be installed: packages that its modules import and that these functions do not use are
replaced by empty ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import sys
import tempfile
import types
import typing
from pathlib import Path
from typing import Any

UNUSED = (
    *("accelerate", "codetiming", "dacite", "datasets", "imageio", "more_itertools", "opentelemetry", "peft"),
    *("pybase64", "ray", "tensordict", "transfer_queue", "trl", "vllm"),
)
CLASSES = {
    "roll.configs.worker_config": ("WorkerConfig", "StrategyArguments", "SequencePackingConfig"),
    "roll.configs.model_args": ("ModelArguments",),
    "roll.configs.training_args": ("TrainingArguments",),
    "roll.configs.data_args": ("DataArguments",),
    "roll.configs.generating_args": ("GeneratingArguments",),
    "roll.pipeline.rlvr.rlvr_config": ("RLVRConfig", "RewardConfig"),
    "roll.pipeline.agentic.agentic_config": ("AgenticConfig",),
    "roll.pipeline.sft.sft_config": ("SFTConfig",),
    "roll.pipeline.dpo.dpo_config": ("DPOConfig",),
}


class _Empty(types.ModuleType):
    """A module whose every name is a class that does nothing."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda self, *_, **__: None, "__class_getitem__": classmethod(_itself)})


def _itself(cls: Any, _: Any) -> Any:
    return cls


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] in UNUSED else None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


def prepare(checkout: Path) -> None:
    """Makes `roll` and the modules of `mcore_adapter` that need no accelerator importable."""
    sys.path[:0] = [str(checkout), str(checkout / "mcore_adapter" / "src")]
    for name in ("mcore_adapter", "mcore_adapter.trainer"):  # whose __init__ imports trainers
        package = types.ModuleType(name)
        package.__path__ = [str(checkout / "mcore_adapter" / "src" / name.replace(".", "/"))]
        sys.modules[name] = package
    sys.meta_path.append(_Finder())


def defaults() -> dict[str, dict[str, Any]]:
    """Fields and defaults of `CLASSES`; a section is `{"section": its class}`."""
    found = {}
    for module, names in CLASSES.items():
        for name in names:
            cls = getattr(importlib.import_module(module), name)
            found[name] = {field.name: _default(field) for field in dataclasses.fields(cls)}
    return found


def _default(field: dataclasses.Field[Any]) -> Any:
    value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    if dataclasses.is_dataclass(value):
        return {"section": type(value).__name__}
    return value


def made(kind: Any, data: Any) -> Any:
    """`data` as the dataclass or type `kind`, as `dacite.from_dict` makes it: unknown keys are passed over."""
    options = [one for one in typing.get_args(kind) if one is not type(None)] if _is_union(kind) else [kind]
    for option in options:
        if dataclasses.is_dataclass(option) and isinstance(data, dict):
            hints = typing.get_type_hints(option)
            names = {field.name for field in dataclasses.fields(option)}
            return option(**{key: made(hints[key], value) for key, value in data.items() if key in names})
        if typing.get_origin(option) is dict and typing.get_args(option) and isinstance(data, dict):
            below = typing.get_args(option)[1]
            return {key: made(below, value) for key, value in data.items()}
    return data


def _is_union(kind: Any) -> bool:
    return typing.get_origin(kind) in (typing.Union, types.UnionType)


def config_of(data: dict[str, Any]) -> Any:
    """The RLVR configuration of composed settings, as ROLL's start script makes it."""
    config_class = importlib.import_module("roll.pipeline.rlvr.rlvr_config").RLVRConfig
    return made(config_class, data)


def all_figures(requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`figures` of each; what ROLL itself refuses as `{"error": ...}`."""
    found = []
    for request in requests:
        try:
            found.append(figures(request))
        except (AssertionError, ValueError, TypeError, AttributeError, KeyError, NotImplementedError) as error:
            found.append({"error": f"{type(error).__name__}: {error}"})
    return found


def figures(request: dict[str, Any]) -> dict[str, Any]:
    """What ROLL computes from the settings and samples of `request`; see test_roll_original."""
    config = config_of(request["settings"])
    config.set_max_steps(config.max_steps)
    return {
        "sampling": dataclasses.asdict(config.actor_infer.generating_args),
        "validation": dataclasses.asdict(config.validation.generating_args) if config.validation else None,
        "learning_rates": _learning_rates(config, request["dp_size"]),
        **_losses(config, request),
    }


def _learning_rates(config: Any, dp_size: int) -> list[float]:
    import torch
    from mcore_adapter.trainer.utils import get_megatron_lr_scheduler

    arguments = config.actor_train.training_args
    steps = arguments.max_steps // dp_size
    arguments.lr_scheduler_kwargs = {}  # as ROLL's Megatron strategy sets it, and what follows
    for key, value in config.actor_train.strategy_args.strategy_config.items():
        if hasattr(arguments, key):
            setattr(arguments, key, value)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    optimizer.param_groups[0] |= {"is_decoupled_lr": False, "wd_mult": 1.0, "lr_mult": 1.0}
    scheduler = get_megatron_lr_scheduler(arguments, steps, optimizer)
    found = []
    for _ in range(steps):
        found.append(float(optimizer.param_groups[0]["lr"]))
        scheduler.step()
    return found


class _Samples:
    """What stands in for ROLL's DataProto: a padded batch, and its `meta_info`."""

    def __init__(self, batch: dict[str, Any], meta: dict[str, Any] | None = None) -> None:
        class Batch(dict):  # type: ignore[type-arg]
            batch_size = (len(next(iter(batch.values()))),)

        self.batch, self.meta_info, self.non_tensor_batch = Batch(batch), meta or {}, {}

    def rename(self, old_keys: str, new_keys: str) -> None:
        self.batch[new_keys] = self.batch.pop(old_keys)


def _losses(config: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Advantages per domain, and the loss of all samples as one mini-batch."""
    import torch
    from roll.utils import functionals
    from roll.utils.kl_controller import get_kl_controller

    samples = {key: torch.tensor(value) for key, value in request["samples"].items()}
    response = samples["response_mask"]
    prompts, width = request["prompt_length"], response.shape[1]
    scores = samples["scores"].float()
    parts = []
    for domain in dict.fromkeys(request["domains"]):
        rows = [row for row, name in enumerate(request["domains"]) if name == domain]
        batch = {key: value[rows] for key, value in samples.items()}
        batch |= {"scores": scores[rows], "response_level_rewards": scores[rows].clone()}
        batch["responses"] = torch.zeros(len(rows), width - prompts)
        batch["position_ids"] = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)
        data = _Samples(batch)
        data, _ = functionals.get_sample_level_mask(data, config)
        running = functionals.RunningMoments()  # one for each domain; `reward_norm` looks for the key "domain"
        data, _ = functionals.reward_postprocess(data, config, {"domain": running})
        control = get_kl_controller(config.init_kl_coef, config.target_kl, config.kl_horizon)
        data, _ = functionals.compute_token_reward(data, config, control)
        data = functionals.compute_advantage(
            data=data,
            gamma=config.gamma,
            lambd=config.lambd,
            adv_estimator=config.adv_estimator,
            advantage_clip=config.advantage_clip,
            whiten_advantages=config.whiten_advantages,
            whiten_rewards=config.whiten_rewards,
            response_mask=data.batch["final_response_mask"].clone(),
            pipeline_config=config,
        )
        parts.append((rows, data.batch))
    whole: dict[str, Any] = {}
    for key in ("advantages", "final_response_mask"):
        whole[key] = torch.zeros(len(scores), width - 1)
        for rows, batch in parts:
            whole[key][rows] = batch[key].float()
    loss, gradient = _loss(config, samples, whole, scores)
    return {
        "advantages": whole["advantages"].tolist(),
        "mask": whole["final_response_mask"].tolist(),
        "loss": loss,
        "gradient": gradient,
    }


def _loss(config: Any, samples: dict[str, Any], whole: dict[str, Any], scores: Any) -> tuple[float, Any]:
    """The loss, and its gradient by the log-probs."""
    import logging

    import torch

    module, _, name = config.actor_train.worker_cls.rpartition(".")
    kind = getattr(importlib.import_module(module), name)
    worker: Any = object.__new__(type(name, (kind,), {"logger": logging.getLogger("roll")}))
    worker.pipeline_config = config
    worker._logprobs_cache, worker._pg_config_cache = {}, {}
    for flag in ("_pg_variant_logged", "_topr_sample_logged", "_cispo_config_logged", "_kimi15_config_logged"):
        setattr(worker, flag, True)
    log_probs = samples["log_probs"].clone().requires_grad_(True)
    worker.strategy = types.SimpleNamespace(
        op_compute_log_probs=lambda **_: log_probs,
        op_compute_entropy=lambda **_: torch.zeros_like(log_probs),
    )
    mask, final = samples["response_mask"][:, 1:], whole["final_response_mask"]
    batch = {**samples, **whole, "scores": scores, "train_infer_is_weight": torch.ones_like(log_probs)}
    meta = {
        "batch_num_tokens": {"response_mask": mask.sum(), "final_response_mask": final.sum()},
        "global_valid_samples": {
            "response_mask": (mask.sum(-1) > 0).sum(),
            "final_response_mask": (final.sum(-1) > 0).sum(),
        },
    }
    config.enable_old_logprobs_recompute = True  # the batch holds old log-probs
    total, _ = worker.loss_func(_Samples(batch, meta), torch.zeros(1))
    total.backward()
    assert log_probs.grad is not None
    return float(total), log_probs.grad.tolist()


def main() -> None:
    checkout, what = Path(sys.argv[1]).resolve(), sys.argv[2]
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        os.chdir(folder)
        os.environ["ROLL_LOG_DIR"] = folder
        prepare(checkout)
        found = defaults() if what == "defaults" else all_figures(json.load(sys.stdin))
        os.chdir("/")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
