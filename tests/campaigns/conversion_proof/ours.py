"""The same figures of the job that a converted file describes, by our own schedule, advantages and loss."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from roll_batching.errors import DataError
from roll_batching.jobs.config import JobConfig
from roll_batching.samples import SampleBatch
from roll_batching.samples.token_fields import counted_positions
from roll_batching.tools.conversion.foreign_job import data_parallel_ranks
from tests.campaigns.conversion_proof.answers import Figures
from tests.campaigns.conversion_proof.samples import BATCH, PROMPT
from tests.campaigns.conversion_proof.stand_ins import optimizer

_KINDS = dict.fromkeys(("old_log_probs", "ref_log_probs", "rollout_log_probs", "old_values"), "next_token")


def figures(job: JobConfig, samples: dict[str, Any], steps: int, *, old_is_current: bool = False) -> Figures:
    """Figures of `job` for `steps` RL steps; of a supervised job those of its optimizer steps.

    `old_is_current`: the host's loss takes the current log-probs for the old ones, which they are here in jobs with one
    optimizer step per rollout.
    """
    found = _batching(job, steps)
    if job.task in ("grpo", "sft"):
        batch = samples["batch"]
        if old_is_current and found["loss.old_is_current"]:
            batch = {**batch, "old_log_probs": batch["log_probs"]}
        found |= _loss(job, batch)
    if job.task == "grpo":
        found |= {**_sampling(job), **_advantages(job, samples)}
    return found


def ranks_of(job: JobConfig) -> int:
    """Data-parallel ranks on the file's devices, also where its experts do not fit on them."""
    layout = job.actor_train.strategy_args.strategy_config
    return data_parallel_ranks(layout.model_dump(), job.world_size or 1)


def _batching(job: JobConfig, steps: int) -> Figures:
    from roll_batching.jobs.objectives.from_config import schedule_of, supervised_schedule_of
    from roll_batching.modeling.builder import build_scheduler

    role, training = job.actor_train, job.actor_train.training_args
    dp_size = ranks_of(job)
    mini, is_rl = job.mini_batch_size(dp_size), job.task == "grpo"
    packing, layout = role.sequence_packing_args, role.strategy_args.strategy_config
    context = layout.context_parallel_size if isinstance(layout.context_parallel_size, int) else 1
    packed = role.use_sequence_packing
    found: Figures = {
        "batch.mini_batch": mini,
        "batch.packed": packed,
        "batch.micro_batch": None if packed else training.per_device_train_batch_size,
        "batch.sequence_length": job.sequence_length,
        "optimizer.betas": [training.adam_beta1, training.adam_beta2],
        "optimizer.epsilon": training.adam_epsilon,
        "optimizer.weight_decay": training.weight_decay,
        "optimizer.max_grad_norm": training.max_grad_norm,
    }
    for name in ("train", "forward"):
        cap = getattr(packing, f"max_packed_sequence_length_{name}")
        if cap is None and name == "forward":
            cap = packing.max_packed_sequence_length_train
        found[f"batch.cap_{name}"] = cap // context if packed and cap is not None else None
    count = 1
    if is_rl:
        count = -(-job.samples_per_rollout // mini) * job.ppo_epochs
        found |= {
            "batch.prompts": job.rollout_batch_size,
            "batch.group": job.group_size,
            "batch.epochs": job.ppo_epochs,
            "batch.optimizer_steps": count,
            "loss.old_is_current": count == 1 and role.logprob_plan != "rollout",
        }
    schedule = schedule_of(job, dp_size) if is_rl else supervised_schedule_of(job, steps * mini, mini)
    made = optimizer()
    scheduler, rates = build_scheduler(made, schedule, schedule.max_steps), []
    for _ in range(steps * count):
        rates.append(float(made.param_groups[0]["lr"]))
        scheduler.step(1)
    return found | {"learning_rates": rates}


def _sampling(job: JobConfig) -> Figures:
    rollouts, held_out = job.actor_infer.generating_args, job.validation.generating_args
    found: Figures = {
        "sampling.prompt_length": job.prompt_length,
        "sampling.response_length": job.response_length,
        "validation.greedy": not held_out.do_sample,
        "validation.answers": held_out.num_return_sequences or 1,
        "validation.response_length": held_out.max_new_tokens,
    }
    for name in ("temperature", "top_p", "top_k"):
        found |= {f"sampling.{name}": getattr(rollouts, name), f"validation.{name}": getattr(held_out, name)}
    return found


def _batch_of(responses: dict[str, Any], job: JobConfig, **samples: Any) -> SampleBatch:
    """Responses behind prompts of `PROMPT` tokens; `samples` are fields with a number for each."""
    lengths = responses["lengths"]
    fields: dict[str, Any] = {
        "input_ids": [torch.zeros(PROMPT + length, dtype=torch.long) for length in lengths],
        "response_mask": [torch.arange(PROMPT + length) >= PROMPT for length in lengths],
    }
    for name in _KINDS:
        rows = zip(responses[name], lengths, strict=True)
        fields[name] = [_next_token(torch.tensor(row[:length])) for row, length in rows]
    plan = job.actor_train.logprob_plan
    if plan == "rollout":
        fields["old_log_probs"] = fields["rollout_log_probs"]
    elif plan == "none":
        del fields["old_log_probs"]
    kinds = {"input_ids": "token", "response_mask": "token", **_KINDS, **dict.fromkeys(samples, "sample")}
    return SampleBatch.from_lists({**fields, **samples}, {name: kinds[name] for name in (*fields, *samples)})


def _next_token(row: torch.Tensor) -> torch.Tensor:
    """Numbers of response tokens as those of the token before: [prompt + response - 1]."""
    return torch.cat([row.new_zeros(PROMPT - 1), row])


def _wide(flat: Any, batch: SampleBatch, width: int) -> list[list[float]]:
    """[n, width] over response tokens of [tokens] over next tokens."""
    found = np.zeros((len(batch), width))
    for row, (start, length) in enumerate(zip(batch.offsets.tolist(), batch.lengths.tolist(), strict=False)):
        found[row, : length - PROMPT] = flat[start + PROMPT - 1 : start + length - 1]
    return [[float(value) for value in row] for row in found]


def _layout() -> Any:
    from roll_batching.distributed.parallel_layout import make_layout, start_processes
    from roll_batching.planning import ParallelDims

    if "made" not in _LAYOUTS:
        _LAYOUTS["made"] = make_layout(ParallelDims(), start_processes())
    return _LAYOUTS["made"]


_LAYOUTS: dict[str, Any] = {}
"""This process's layout of one rank, made once."""


def _advantages(job: JobConfig, samples: dict[str, Any]) -> Figures:
    from roll_batching.jobs.objectives.advantages import shape_rewards
    from roll_batching.jobs.objectives.from_config import advantages_of

    step = samples["step"]
    advantages, lengths = advantages_of(job), np.array(step["lengths"])
    rewards, width = np.array(step["rewards"]), len(step["old_log_probs"][0])
    if job.shapes_rewards:
        rewards = shape_rewards(job, rewards, lengths)
    options = {"baselines": np.array(step["baselines"])} if advantages.greedy else {}
    try:
        of_samples = advantages(rewards, job.group_size, response_tokens=lengths, **options)
    except DataError as error:  # a job that stops at its first step
        return {"advantages": f"stops: {error}"}
    batch = _corrected(_batch_of(step, job, advantages=torch.tensor(of_samples)), job)
    if advantages.of_tokens is None:
        found = np.array(of_samples)[:, None].repeat(width, axis=1)
    else:
        batch, _ = advantages.of_tokens(batch, _layout(), np.full(len(rewards), ""))
        found = np.array(_wide(batch["advantages"].double().numpy(), batch, width))
    mask = np.array(_wide(counted_positions(batch).double().numpy(), batch, width))
    return {"advantages": (found * mask).tolist()}


def _corrected(batch: SampleBatch, job: JobConfig) -> SampleBatch:
    """`batch` with the weights and the mask of `train_infer_correction`, if the job has one."""
    from roll_batching.losses.train_infer import with_correction

    if job.train_infer_correction is None:
        return batch
    return with_correction(batch, job.train_infer_correction, _layout())[0]


def _loss(job: JobConfig, responses: dict[str, Any]) -> Figures:
    from roll_batching.jobs.objectives.from_config import loss_of
    from tests.losses.formulas import run

    width = len(responses["log_probs"][0])
    samples = {"advantages": torch.tensor(responses["advantages"], dtype=torch.float64)}
    batch = _corrected(_batch_of(responses, job, **samples), job)
    leaf = torch.zeros(batch.num_tokens, 2, dtype=torch.float64)
    for column, name in enumerate(("log_probs", "entropy")):
        rows = zip(responses[name], batch.offsets.tolist(), batch.lengths.tolist(), strict=False)
        for row, start, length in rows:
            leaf[start : start + length - 1, column] = _next_token(torch.tensor(row[: length - PROMPT]))
    loss = loss_of(job)
    if (prepare := getattr(loss, "prepare", None)) is not None:
        batch = prepare(batch, _layout(), 0)
    bins = [list(range(start, min(start + 5, BATCH))) for start in range(0, BATCH, 5)]
    total, gradient, _ = run(loss, batch, bins, rows=leaf)
    return {
        "loss": total,
        "loss.gradient": _wide(gradient[:, 0], batch, width),
        "loss.entropy_gradient": _wide(gradient[:, 1], batch, width),
    }
