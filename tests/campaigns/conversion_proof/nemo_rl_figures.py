"""NeMo-RL's figures: its composed settings, schedule, advantages and loss, by its own code.

    python -m tests.campaigns.conversion_proof.nemo_rl_figures CHECKOUT < requests.json > figures.json

Megatron-Bridge, which turns NeMo-RL's iterations into Megatron's samples and is no package here, stands in `_megatron`
(src/megatron/bridge/training/config.py and optim.py); the schedule itself is Megatron-Core's. DTensor's schedules are
torch's, built as `nemo_rl/models/automodel/setup.py` builds them, in the middle of a function that needs a model.
"""

from __future__ import annotations

import os
import re
from typing import Any

from tests.campaigns.conversion_proof.answers import Figures, answer_all, padded
from tests.campaigns.conversion_proof.samples import BATCH, PROMPT
from tests.campaigns.conversion_proof.stand_ins import StandIns, optimizer

PACKAGES = ("zmq", "nvtx", "num2words", "plotly", "sacrebleu", "mlflow", "swanlab", "torchao", "decord", "accelerate")
MODULES = tuple(
    f"nemo_rl.{name}"
    for name in (
        "models environments experience weight_sync data data_plane distributed.virtual_cluster "
        "distributed.ray_actor_environment_registry utils.checkpoint utils.venvs utils.logger utils.memory_tracker "
        "utils.nsys utils.multimodal_payload_metrics"
    ).split()
)
"""Modules of NeMo-RL that its algorithms import for work that no figure needs; some assert versions of packages."""
_LARGEST = 10**6
"""Steps of a job without a limit, which NeMo-RL writes as this number."""


def prepare() -> StandIns:
    return StandIns(PACKAGES, MODULES)


def figures(request: dict[str, Any]) -> Figures:
    config = _composed(request["file"])
    section = next((name for name in ("grpo", "sft", "dpo", "rm", "distillation", "ppo") if name in config), None)
    if section not in ("grpo", "sft", "dpo"):
        raise NotImplementedError(f"the section {section} is not compared")
    found = _batching(config, section, request["steps"])
    if section == "grpo":
        found |= {**_sampling(config), **_advantages(config, request["samples"]), **_loss(config, request["samples"])}
    elif section == "sft":
        found |= _text_loss(request["samples"]["batch"])
    return found


def _composed(path: str) -> dict[str, Any]:
    """The settings as NeMo-RL's programs load them; variables of the environment that are not set have a text."""
    from nemo_rl.utils.config import load_config, register_omegaconf_resolvers
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    register_omegaconf_resolvers()
    config = load_config(path)
    while True:
        try:
            data = OmegaConf.to_container(config, resolve=True)
            assert isinstance(data, dict)
            return data
        except OmegaConfBaseException as error:
            missing = re.search(r"Environment variable '(\w+)' not found", str(error))
            if missing is None:
                raise
            os.environ[missing[1]] = "unset"


def _batching(config: dict[str, Any], section: str, steps: int) -> Figures:
    policy, algorithm = config["policy"], config[section]
    size, pairs = policy["train_global_batch_size"], 2 if section == "dpo" else 1
    count = 1
    found: Figures = {}
    if section == "grpo":
        prompts, group = algorithm["num_prompts_per_step"], algorithm["num_generations_per_prompt"]
        count = prompts * group // size
        found |= {"batch.prompts": prompts, "batch.group": group, "batch.optimizer_steps": count}
    packing = policy.get("sequence_packing") or {}
    packed = bool(packing.get("enabled"))
    dynamic = bool((policy.get("dynamic_batching") or {}).get("enabled"))
    if not dynamic:
        rows = policy["train_micro_batch_size"] * pairs
        found |= {"batch.packed": packed, "batch.micro_batch": None if packed else rows}
    if packed:
        context = _context_size(policy)
        caps = {"train": packing["train_mb_tokens"], "forward": packing.get("logprob_mb_tokens")}
        caps = {name: cap for name, cap in caps.items() if cap is not None and (name == "train" or section == "grpo")}
        found |= {f"batch.cap_{name}": int(cap) // context for name, cap in caps.items()}
    total = algorithm.get("max_num_steps") or _LARGEST
    megatron = bool((policy.get("megatron_cfg") or {}).get("enabled"))
    rates, optimizer_figures = _megatron(policy, total, steps) if megatron else _dtensor(policy, steps)
    return {
        **found,
        **optimizer_figures,
        "batch.mini_batch": size * pairs,
        "batch.sequence_length": policy["max_total_sequence_length"],
        "learning_rates": [rate for rate in rates for _ in range(count)],
    }


def _context_size(policy: dict[str, Any]) -> int:
    megatron = policy.get("megatron_cfg") or {}
    section = megatron if megatron.get("enabled") else policy.get("dtensor_cfg") or {}
    return int(section.get("context_parallel_size") or 1)


def _megatron(policy: dict[str, Any], total: int, steps: int) -> tuple[list[float], Figures]:
    """Learning rates of `steps` calls of `train`, each one tick of the schedule, whatever its optimizer steps."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    settings, schedule = policy["megatron_cfg"]["optimizer"], policy["megatron_cfg"]["scheduler"]
    size, made = policy["train_global_batch_size"], optimizer()
    decay = (schedule.get("lr_decay_iters") or total) * size
    warmup = schedule["lr_warmup_iters"] * size
    scheduler = OptimizerParamScheduler(
        made,
        init_lr=schedule["lr_warmup_init"],
        max_lr=settings["lr"],
        min_lr=settings["min_lr"],
        lr_warmup_steps=min(warmup, decay - 1),
        lr_decay_steps=decay,
        lr_decay_style=schedule["lr_decay_style"],
        start_wd=schedule["start_weight_decay"],
        end_wd=schedule["end_weight_decay"],
        wd_incr_steps=total * size,
        wd_incr_style=schedule["weight_decay_incr_style"],
    )
    rates = []
    for _ in range(steps):
        rates.append(float(made.param_groups[0]["lr"]))
        scheduler.step(increment=size)
    return rates, {
        "optimizer.betas": [settings["adam_beta1"], settings["adam_beta2"]],
        "optimizer.epsilon": settings["adam_eps"],
        "optimizer.weight_decay": settings["weight_decay"],
        "optimizer.max_grad_norm": settings["clip_grad"],
    }


def _dtensor(policy: dict[str, Any], steps: int) -> tuple[list[float], Figures]:
    import torch
    from hydra.utils import get_class

    settings = policy["optimizer"]["kwargs"]
    made = optimizer(settings["lr"])
    sections = policy.get("scheduler")
    if sections is None:
        scheduler: Any = torch.optim.lr_scheduler.LambdaLR(made, lr_lambda=lambda _: 1)
    elif isinstance(sections, dict):
        scheduler = get_class(sections["name"])(made, **sections["kwargs"])
    else:
        parts = [get_class(one["name"])(made, **one["kwargs"]) for one in sections if "name" in one]
        milestones = [one["milestones"] for one in sections if "name" not in one][-1]
        scheduler = torch.optim.lr_scheduler.SequentialLR(made, parts, milestones)
    rates = []
    for _ in range(steps):
        rates.append(float(made.param_groups[0]["lr"]))
        made.step()
        scheduler.step()
    limit = policy["max_grad_norm"]
    return rates, {
        "optimizer.betas": settings["betas"],
        "optimizer.epsilon": float(settings["eps"]),
        "optimizer.weight_decay": settings["weight_decay"],
        "optimizer.max_grad_norm": 0.0 if limit is None else limit,
    }


def _sampling(config: dict[str, Any]) -> Figures:
    generation = config["policy"]["generation"]
    found = {f"sampling.{name}": generation[name] for name in ("temperature", "top_p")}
    found["sampling.top_k"] = max(generation["top_k"] or 0, 0)
    found["sampling.response_length"] = generation["max_new_tokens"]
    if config["data"].get("max_input_seq_length") is not None:
        found["sampling.prompt_length"] = config["data"]["max_input_seq_length"]
    return found


def _wide(values: Any) -> Any:
    """[n, tokens of the response] as [n, tokens], where a column speaks of its own token."""
    import torch.nn.functional as F

    return F.pad(values, (PROMPT, 0))


def _train_data(responses: dict[str, Any]) -> Any:
    """NeMo-RL's batch, with the log-probs that its trainer adds."""
    import torch
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

    fields = padded(responses)
    mask = _wide(fields["mask"])
    return BatchedDataDict(
        {
            "input_ids": torch.zeros_like(mask),
            "prev_logprobs": _wide(fields["old_log_probs"]),
            "generation_logprobs": _wide(fields["rollout_log_probs"]),
            "reference_policy_logprobs": _wide(fields["ref_log_probs"]),
            "token_mask": mask.float(),
            "sample_mask": torch.ones(len(mask)),
        }
    )


def _advantages(config: dict[str, Any], samples: dict[str, Any]) -> Figures:
    from types import SimpleNamespace

    import torch
    from nemo_rl.algorithms import grpo
    from nemo_rl.algorithms.loss import ClippedPGLossConfig
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

    step, group = samples["step"], samples["group_size"]
    settings = grpo.GRPOConfig(**config["grpo"])
    master = SimpleNamespace(grpo=settings, loss_fn=ClippedPGLossConfig(**config["loss_fn"]))
    rewards = BatchedDataDict({"total_reward": torch.tensor(step["rewards"])})
    rewards = grpo.scale_rewards(rewards, settings.reward_scaling)["total_reward"]
    data = _train_data(step)
    grpo.compute_and_apply_seq_logprob_error_masking(data, rewards, settings.seq_logprob_error_threshold)
    mask = data["token_mask"] * data["sample_mask"].unsqueeze(-1)
    advantages = grpo._create_advantage_estimator(master).compute_advantage(
        prompt_ids=torch.arange(len(rewards)).div(group, rounding_mode="floor")[:, None],
        rewards=rewards,
        mask=mask,
        repeated_batch=None,
        logprobs_policy=data["prev_logprobs"],
        logprobs_reference=data["reference_policy_logprobs"],
    )
    return {"advantages": (grpo._clip_grpo_advantages(advantages, settings) * mask)[:, PROMPT:].tolist()}


def _loss(config: dict[str, Any], samples: dict[str, Any]) -> Figures:
    import torch
    from nemo_rl.algorithms import grpo
    from nemo_rl.algorithms.loss import ClippedPGLossConfig, ClippedPGLossFn

    batch = samples["batch"]
    loss_fn = ClippedPGLossFn(ClippedPGLossConfig(**config["loss_fn"]))
    if loss_fn.force_on_policy_ratio:  # the trainer's log-probs are those of the step's weights
        batch = {**batch, "old_log_probs": batch["log_probs"]}
    data = _train_data(batch)
    data["advantages"] = torch.tensor(batch["advantages"])[:, None] * data["token_mask"]
    threshold = grpo.GRPOConfig(**config["grpo"]).seq_logprob_error_threshold
    grpo.compute_and_apply_seq_logprob_error_masking(data, torch.zeros(BATCH), threshold)
    log_probs = padded(batch)["log_probs"].requires_grad_()
    loss, _ = loss_fn(next_token_logprobs=_wide(log_probs)[:, 1:], data=data, **_counts(data))
    (gradient,) = torch.autograd.grad(loss, log_probs)
    found: Figures = {"loss": float(loss.detach()), "loss.gradient": gradient.tolist()}
    return found | {"loss.old_is_current": True} if loss_fn.force_on_policy_ratio else found


def _counts(data: Any) -> dict[str, Any]:
    """Sequences and tokens of the global batch, as its workers sum them."""
    return {
        "global_valid_seqs": data["sample_mask"].sum(),
        "global_valid_toks": (data["token_mask"][:, 1:] * data["sample_mask"].unsqueeze(-1)).sum(),
    }


def _text_loss(batch: dict[str, Any]) -> Figures:
    import torch
    from nemo_rl.algorithms.loss.loss_functions import NLLLossFn

    data = _train_data(batch)
    log_probs = padded(batch)["log_probs"].requires_grad_()
    loss, _ = NLLLossFn()(next_token_logprobs=_wide(log_probs)[:, 1:], data=data, **_counts(data))
    (gradient,) = torch.autograd.grad(loss, log_probs)
    return {"loss": float(loss.detach()), "loss.gradient": gradient.tolist()}


if __name__ == "__main__":
    answer_all(prepare, figures)
