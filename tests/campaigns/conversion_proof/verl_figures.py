"""verl's figures: its composed settings, schedule, advantages and loss, by its own code.

    python -m tests.campaigns.conversion_proof.verl_figures CHECKOUT < requests.json > figures.json

Needs `tensordict`, whose batches verl's losses read.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tests.campaigns.conversion_proof.answers import Figures, answer_all, padded
from tests.campaigns.conversion_proof.samples import BATCH, PROMPT
from tests.campaigns.conversion_proof.stand_ins import StandIns, optimizer

PACKAGES = (
    *("peft", "cachetools", "transfer_queue", "codetiming", "accelerate", "uvicorn", "fastapi", "vllm", "sglang"),
    *("mbridge", "megatron.bridge", "torchao", "dill", "pylatexenc", "aiohttp", "qwen_vl_utils", "liger_kernel"),
)
_MEMORY = ("use_precision_aware_optimizer", "optimizer_cpu_offload", "optimizer_offload_fraction")
"""Options of Megatron's optimizer that need TransformerEngine and change no figure."""
_CONFIGS = {"ppo": "ppo_trainer", "sft": "sft_trainer_engine"}


def prepare() -> StandIns:
    os.environ |= {
        "VERL_PLATFORM": "cpu",
        "VERL_ENGINE_DEVICE": "cpu",
        "VERL_USE_EXTERNAL_MODULES": "tests.hosts.verl_cpu_platform",
    }
    return StandIns(PACKAGES)


def figures(request: dict[str, Any]) -> Figures:
    config = _composed(request["checkout"], request["program"], request["arguments"])
    if "actor_rollout_ref" not in config:
        return _of_texts(config, request)
    return {**_batching(config, request), **_sampling(config), **_advantages(config, request), **_loss(config, request)}


def _composed(checkout: str, program: str, arguments: list[str]) -> Any:
    """verl's settings with the overrides of a command, as Hydra makes them for verl's programs."""
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    name = _CONFIGS["sft" if "sft" in program else "ppo"]
    overrides, words = [], iter(arguments)
    for word in words:
        option, equals, value = word.partition("=")
        if option in ("--config-name", "--config-path", "-cn", "-cp"):
            value = value if equals else next(words)
            name = value.removesuffix(".yaml") if option in ("--config-name", "-cn") else name
        elif not word.startswith(("hydra.", "-")):
            overrides.append(word)
    with initialize_config_dir(str(Path(checkout) / "verl" / "trainer" / "config"), version_base=None):
        config = compose(name, overrides)
    OmegaConf.set_struct(config, False)
    return config


def _optimizer_config(config: Any, section: Any, steps: int) -> Any:
    """The optimizer's settings, with the length of the job as verl's trainer sets it."""
    from verl.utils.config import omega_conf_to_dataclass

    total = config.trainer.total_training_steps
    section.total_training_steps = steps if total is None else total
    for name in _MEMORY:
        (section.get("override_optimizer_config") or {}).pop(name, None)
    if "use_precision_aware_optimizer" in section:
        section.use_precision_aware_optimizer = False  # TransformerEngine's, and a question of memory
    return omega_conf_to_dataclass(section)


def _rates(settings: Any, megatron: bool, count: int, steps: int) -> list[float]:
    """Learning rates of `count` optimizer steps of each RL step: the schedule moves after the last of them."""
    if megatron:
        from verl.utils.megatron.optimizer import get_megatron_optimizer_param_scheduler

        made = optimizer()
        scheduler = get_megatron_optimizer_param_scheduler(made, settings)
        options = {"increment": 1}
    else:
        from types import SimpleNamespace

        from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

        made, options = optimizer(settings.lr), {}
        scheduler = FSDPEngine._build_lr_scheduler(SimpleNamespace(optimizer_config=settings, rank=1), made)
    rates = []
    for _ in range(steps):
        rates += [float(made.param_groups[0]["lr"])] * count
        made.step()
        scheduler.step(**options)
    return rates


def _optimizer_figures(settings: Any, megatron: bool) -> Figures:
    found = {"optimizer.weight_decay": settings.weight_decay, "optimizer.max_grad_norm": settings.clip_grad}
    if megatron:
        from megatron.core.optimizer import OptimizerConfig
        from verl.utils.megatron.optimizer import init_megatron_optim_config

        made: OptimizerConfig = init_megatron_optim_config(settings)
        return found | {"optimizer.betas": [made.adam_beta1, made.adam_beta2]}
    return found | {"optimizer.betas": list(settings.betas)}


def _batching(config: Any, request: dict[str, Any]) -> Figures:
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    megatron = actor.strategy == "megatron"
    mini = actor.ppo_mini_batch_size * rollout.n
    count = config.data.train_batch_size * rollout.n // mini * actor.ppo_epochs
    settings = _optimizer_config(config, actor.optim, request["steps"])
    packed = bool(actor.use_dynamic_bsz)
    return {
        "batch.prompts": config.data.train_batch_size,
        "batch.group": rollout.n,
        "batch.mini_batch": mini,
        "batch.epochs": actor.ppo_epochs,
        "batch.packed": packed,
        "batch.micro_batch": None if packed else actor.ppo_micro_batch_size_per_gpu,
        "batch.cap_train": actor.ppo_max_token_len_per_gpu if packed else None,
        "batch.cap_forward": rollout.log_prob_max_token_len_per_gpu if packed else None,
        "batch.optimizer_steps": count,
        "learning_rates": _rates(settings, megatron, count, request["steps"]),
        **_optimizer_figures(settings, megatron),
    }


def _sampling(config: Any) -> Figures:
    rollout = config.actor_rollout_ref.rollout
    held_out, evaluates = rollout.val_kwargs, config.trainer.val_before_train or config.trainer.test_freq > 0
    found = {
        "sampling.temperature": rollout.temperature,
        "sampling.top_p": rollout.top_p,
        "sampling.top_k": max(rollout.top_k, 0),
        "sampling.prompt_length": config.data.max_prompt_length,
        "sampling.response_length": config.data.max_response_length,
    }
    if config.data.val_files and evaluates:
        greedy = not held_out.do_sample or held_out.temperature == 0
        found |= {"validation.greedy": greedy, "validation.answers": held_out.n}
        if not greedy:
            found |= {f"validation.{name}": held_out[name] for name in ("temperature", "top_p")}
            found["validation.top_k"] = max(held_out.top_k, 0)
    return found


def _corrected(config: Any, data: Any) -> Any:
    """The batch with weights and the mask of `rollout_correction`, as the trainer adds them before advantages."""
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch

    correction = config.algorithm.rollout_correction
    if correction is None or correction.bypass_mode or not config.actor_rollout_ref.rollout.calculate_log_probs:
        return data
    return compute_rollout_correction_and_add_to_batch(data, correction)[0]


def _fields(responses: dict[str, Any], config: Any) -> dict[str, Any]:
    """Tensors [n, longest response] with verl's names."""
    fields = padded(responses)
    fields["response_mask"] = fields.pop("mask")
    fields["ref_log_prob"] = fields.pop("ref_log_probs")
    fields["values"] = fields.pop("old_values")
    correction = config.algorithm.rollout_correction
    if correction is not None and correction.bypass_mode:
        fields["old_log_probs"] = fields["rollout_log_probs"]
    return fields


def _advantages(config: Any, request: dict[str, Any]) -> Figures:
    import numpy as np
    import torch
    from verl import DataProto
    from verl.trainer.ppo import core_algos
    from verl.trainer.ppo.ray_trainer import apply_kl_penalty, compute_advantage

    step, group = request["samples"]["step"], request["samples"]["group_size"]
    fields = _fields(step, config)
    mask, count = fields["response_mask"], len(step["lengths"])
    scores = torch.zeros_like(fields["old_log_probs"])
    scores[torch.arange(count), mask.sum(-1) - 1] = torch.tensor(step["rewards"])
    fields |= {"token_level_scores": scores, "token_level_rewards": scores.clone()}
    if config.algorithm.adv_estimator == "remax":
        fields["reward_baselines"] = torch.tensor(step["baselines"]).repeat_interleave(group)
    uid = np.array([str(number // group) for number in range(count)], dtype=object)
    data = DataProto.from_dict(tensors=fields, non_tensors={"uid": uid})
    algorithm = config.algorithm
    if algorithm.use_kl_in_reward:
        control = core_algos.get_kl_controller(algorithm.kl_ctrl)
        data, _ = apply_kl_penalty(data, kl_ctrl=control, kl_penalty=algorithm.kl_penalty)
    data = _corrected(config, data)
    data = compute_advantage(
        data,
        adv_estimator=algorithm.adv_estimator,
        gamma=algorithm.gamma,
        lam=algorithm.lam,
        num_repeat=group,
        norm_adv_by_std_in_grpo=algorithm.get("norm_adv_by_std_in_grpo", True),
        config=algorithm,
    )
    return {"advantages": (data.batch["advantages"] * data.batch["response_mask"]).tolist()}


def _loss(config: Any, request: dict[str, Any]) -> Figures:
    import torch
    from tensordict import TensorDict
    from verl import DataProto
    from verl.utils import tensordict_utils as tu
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.utils.losses import ppo_loss

    batch = request["samples"]["batch"]
    fields, lengths = _fields(batch, config), batch["lengths"]
    log_probs, entropy = (fields.pop(name).requires_grad_() for name in ("log_probs", "entropy"))
    real = fields["response_mask"].clone()
    corrected = _corrected(config, DataProto.from_dict(tensors=fields)).batch
    advantages = torch.tensor(batch["advantages"])[:, None] * real

    def jagged(rows: Any) -> Any:
        return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)

    def tails(values: Any) -> Any:
        return jagged(row[:length] for row, length in zip(values, lengths, strict=True))

    def whole(values: Any) -> Any:
        """Rows of whole sequences, where the row of a token speaks of the next one."""
        rows = zip(values, lengths, strict=True)
        return jagged(torch.cat([row.new_zeros(PROMPT - 1), row[:length], row.new_zeros(1)]) for row, length in rows)

    tensors = {
        "prompts": jagged(torch.zeros(PROMPT, dtype=torch.long) for _ in lengths),
        "responses": jagged(torch.zeros(length, dtype=torch.long) for length in lengths),
        "advantages": tails(advantages),
    }
    names = ("response_mask", "old_log_probs", "ref_log_prob", "rollout_is_weights")
    tensors |= {name: tails(corrected[name]) for name in names if name in corrected}
    data = TensorDict(tensors, batch_size=[BATCH])
    counted = int(corrected["response_mask"].sum())
    tu.assign_non_tensor(data, global_batch_size=BATCH, batch_num_tokens=counted, dp_size=1)
    output = {"log_probs": whole(log_probs), "entropy": whole(entropy)}
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    loss, _ = ppo_loss(actor, output, data)
    gradients = torch.autograd.grad(loss, (log_probs, entropy), allow_unused=True)
    found = [torch.zeros_like(log_probs) if one is None else one for one in gradients]
    return {
        "loss": float(loss),
        "loss.gradient": (found[0] * real).tolist(),
        "loss.entropy_gradient": (found[1] * real).tolist(),
    }


def _of_texts(config: Any, request: dict[str, Any]) -> Figures:
    """Figures of verl.trainer.sft_trainer, whose schedule moves with every optimizer step."""
    import torch
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.losses import sft_loss

    megatron = "Mcore" in config.optim._target_
    settings = _optimizer_config(config, config.optim, request["steps"])
    packed = bool(config.data.use_dynamic_bsz)
    batch = request["samples"]["batch"]
    fields = padded(batch)
    log_probs = fields["log_probs"].requires_grad_()
    rows = list(zip(log_probs, batch["lengths"], strict=True))

    def jagged(parts: Any) -> Any:
        return torch.nested.as_nested_tensor(list(parts), layout=torch.jagged)

    whole = jagged(torch.cat([row.new_zeros(PROMPT - 1), row[:length], row.new_zeros(1)]) for row, length in rows)
    masks = jagged(torch.cat([torch.zeros(PROMPT), torch.ones(length)]) for length in batch["lengths"])
    data = TensorDict({"loss_mask": masks}, batch_size=[BATCH])
    tu.assign_non_tensor(data, batch_num_tokens=int(sum(batch["lengths"])), dp_size=1)
    loss, _ = sft_loss(None, {"log_probs": whole}, data)
    (gradient,) = torch.autograd.grad(loss, log_probs)
    return {
        "batch.mini_batch": config.data.train_batch_size,
        "batch.packed": packed,
        "batch.micro_batch": None if packed else config.data.micro_batch_size_per_gpu,
        "batch.cap_train": config.data.max_token_len_per_gpu if packed else None,
        "batch.sequence_length": config.data.max_length,
        "learning_rates": _rates(settings, megatron, 1, request["steps"]),
        **_optimizer_figures(settings, megatron),
        "loss": float(loss),
        "loss.gradient": gradient.tolist(),
    }


if __name__ == "__main__":
    answer_all(prepare, figures)
