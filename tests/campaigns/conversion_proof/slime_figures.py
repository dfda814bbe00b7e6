"""slime's figures: its parsed options, schedule, advantages and loss, by its own code.

    python -m tests.campaigns.conversion_proof.slime_figures CHECKOUT < requests.json > figures.json

Options of Megatron-LM, whose parser slime extends and which is no package, have the types and defaults of
megatron/training/arguments.py (Megatron-LM d98e8a6) below.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

from tests.campaigns.conversion_proof.answers import Figures, answer_all, padded
from tests.campaigns.conversion_proof.samples import BATCH, GROUPS, PROMPT
from tests.campaigns.conversion_proof.stand_ins import StandIns, join_alone, optimizer

PACKAGES = (
    "sglang",
    "sglang_router",
    "megatron.training",
    "megatron.bridge",
    "mbridge",
    "wandb",
    "pylatexenc",
    "httpx",
)
MEGATRON: dict[str, tuple[Any, Any]] = {
    "lr": (float, None),
    "min-lr": (float, 0.0),
    "lr-decay-style": (str, "linear"),
    "lr-decay-iters": (int, None),
    "lr-warmup-iters": (int, 0),
    "lr-warmup-fraction": (float, None),
    "lr-warmup-init": (float, 0.0),
    "lr-wsd-decay-style": (str, "exponential"),
    "lr-wsd-decay-iters": (int, None),
    "weight-decay": (float, 0.01),
    "start-weight-decay": (float, None),
    "end-weight-decay": (float, None),
    "weight-decay-incr-style": (str, "constant"),
    "adam-beta1": (float, 0.9),
    "adam-beta2": (float, 0.999),
    "adam-eps": (float, 1e-8),
    "clip-grad": (float, 1.0),
    "micro-batch-size": (int, None),
    "global-batch-size": (int, None),
    "context-parallel-size": (int, 1),
    "load": (str, None),
    "save": (str, None),
    "save-interval": (int, None),
    "seed": (int, 1234),
    "mtp-num-layers": (int, None),
}
"""Type and default of the options that slime's functions read, besides its own."""
FLAGS = ("calculate-per-token-loss", "use-checkpoint-opt_param-scheduler", "override-opt_param-scheduler")


def prepare() -> StandIns:
    stand_ins = StandIns(PACKAGES)
    join_alone()
    import torch

    torch.compile = lambda function=None, **_: function if function is not None else lambda made: made
    return stand_ins


def figures(request: dict[str, Any]) -> Figures:
    args = _options(request["arguments"], request["steps"])
    found = {**_batching(args, request["steps"]), **_loss(args, request["samples"]["batch"])}
    if args.loss_type == "policy_loss":
        found |= {**_sampling(args), **_advantages(args, request["samples"])}
    return found


def _options(arguments: list[str], steps: int) -> Any:
    """The options as slime's `parse_args` leaves them."""
    from slime.utils.arguments import get_slime_extra_args_provider, slime_validate_args

    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name, (kind, default) in MEGATRON.items():
        parser.add_argument(f"--{name}", type=kind, default=default)
    for name in FLAGS:
        parser.add_argument(f"--{name}", action="store_true")
    get_slime_extra_args_provider()(parser)
    args, _ = parser.parse_known_args(arguments)
    args.ref_load = tempfile.gettempdir()  # checkpoints are not read
    for name in ("opd_teacher_load",):
        if getattr(args, name, None) is not None:
            setattr(args, name, args.ref_load)
    args.debug_rollout_only = getattr(args, "debug_rollout_only", False)
    args.debug_train_only = getattr(args, "debug_train_only", False)
    args.load_debug_rollout_data = getattr(args, "load_debug_rollout_data", None)
    slime_validate_args(args)
    if args.num_rollout is None:
        args.num_rollout = steps
    if args.start_weight_decay is None:  # as Megatron's `validate_args`
        args.start_weight_decay = args.end_weight_decay = args.weight_decay
    if args.global_batch_size is None:
        args.global_batch_size = args.rollout_batch_size * args.n_samples_per_prompt
    return args


def _batching(args: Any, steps: int) -> Figures:
    from slime.backends.megatron_utils.model import get_optimizer_param_scheduler

    supervised = args.loss_type == "sft_loss"
    count = args.rollout_batch_size * args.n_samples_per_prompt // args.global_batch_size
    made = optimizer()
    scheduler, rates = get_optimizer_param_scheduler(args, made), []
    for _ in range(steps if supervised else steps * count):
        rates.append(float(made.param_groups[0]["lr"]))
        scheduler.step(increment=args.global_batch_size)
    packed = bool(args.use_dynamic_batch_size)
    found: Figures = {
        "batch.mini_batch": args.global_batch_size,
        "batch.packed": packed,
        "batch.micro_batch": None if packed else args.micro_batch_size or 1,
        "batch.cap_train": args.max_tokens_per_gpu if packed else None,
        "batch.cap_forward": args.log_probs_max_tokens_per_gpu if packed else None,
        "learning_rates": rates,
        "optimizer.betas": [args.adam_beta1, args.adam_beta2],
        "optimizer.epsilon": args.adam_eps,
        "optimizer.weight_decay": args.weight_decay,
        "optimizer.max_grad_norm": args.clip_grad,
    }
    if not supervised:
        found |= {
            "batch.prompts": args.rollout_batch_size,
            "batch.group": args.n_samples_per_prompt,
            "batch.optimizer_steps": count,
        }
    return found


def _sampling(args: Any) -> Figures:
    found = {f"sampling.{name}": getattr(args, f"rollout_{name}") for name in ("temperature", "top_p")}
    found["sampling.top_k"] = max(args.rollout_top_k, 0)
    found["sampling.response_length"] = args.rollout_max_response_len
    if args.rollout_max_prompt_len is not None:
        found["sampling.prompt_length"] = args.rollout_max_prompt_len
    if args.eval_interval is not None and args.eval_datasets:
        held_out = args.eval_datasets[0]
        found |= {
            "validation.greedy": held_out.temperature == 0,
            "validation.answers": held_out.n_samples_per_eval_prompt,
            "validation.response_length": held_out.max_response_len,
        }
        if held_out.temperature:
            found |= {"validation.temperature": held_out.temperature, "validation.top_p": held_out.top_p}
            found["validation.top_k"] = max(held_out.top_k, 0)
    return found


def _rows(values: Any, lengths: list[int]) -> list[Any]:
    """One tensor per response, which gradients pass."""
    return [row[:length] for row, length in zip(values, lengths, strict=True)]


def _responses(args: Any, responses: dict[str, Any]) -> dict[str, Any]:
    """slime's batch of responses: lists of a tensor per sample."""
    import torch

    lengths, fields = responses["lengths"], padded(responses)
    names = {"log_probs": "old_log_probs", "rollout_log_probs": "rollout_log_probs", "values": "old_values"}
    names |= {"ref_log_probs": "ref_log_probs"} if args.use_kl_loss or args.kl_coef else {}
    masks = [torch.ones(length) for length in lengths]
    return {
        **{name: _rows(fields[field], lengths) for name, field in names.items()},
        "response_lengths": lengths,
        "total_lengths": [PROMPT + length for length in lengths],
        "loss_masks": masks,
        "rollout_mask_sums": [mask.sum() for mask in masks],
        "unconcat_tokens": [torch.zeros(PROMPT + length, dtype=torch.long) for length in lengths],
    }


def _advantages(args: Any, samples: dict[str, Any]) -> Figures:
    import copy
    from types import SimpleNamespace

    import torch
    from slime.backends.megatron_utils.loss import compute_advantages_and_returns
    from slime.ray.rollout import RolloutManager

    step = samples["step"]
    args = copy.copy(args)
    args.rollout_batch_size = GROUPS  # slime makes groups only of as many samples as a step has
    manager = RolloutManager.__ray_metadata__.modified_class
    responses = [SimpleNamespace(get_reward_value=lambda _, value=value: value) for value in step["rewards"]]
    holder = SimpleNamespace(args=args, custom_reward_post_process_func=None)
    _, rewards = manager._post_process_rewards(holder, responses)
    data = {**_responses(args, step), "rewards": rewards}
    compute_advantages_and_returns(args, data)
    width = len(step["old_log_probs"][0])
    return {"advantages": [torch.cat([row, row.new_zeros(width - len(row))]).tolist() for row in data["advantages"]]}


def _loss(args: Any, batch: dict[str, Any]) -> Figures:
    import torch
    from slime.backends.megatron_utils import loss as module

    lengths, fields = batch["lengths"], padded(batch)
    log_probs, entropy = (fields[name].requires_grad_() for name in ("log_probs", "entropy"))
    outputs = {"log_probs": _rows(log_probs, lengths), "entropy": _rows(entropy, lengths)}
    module.get_log_probs_and_entropy = lambda *_, **__: (torch.empty(0), outputs)  # what the model computes
    data = _responses(args, batch)
    advantages = torch.tensor(batch["advantages"])
    data["advantages"] = [value.expand(length) for value, length in zip(advantages, lengths, strict=True)]
    loss, divisor, _ = module.loss_function(args, data, 1, BATCH, torch.zeros(1))
    loss = loss / divisor
    gradients = torch.autograd.grad(loss, (log_probs, entropy), allow_unused=True)
    found = [torch.zeros_like(log_probs) if one is None else one for one in gradients]
    return {"loss": float(loss.detach()), **_gradients(args, found)}


def _gradients(args: Any, found: list[Any]) -> Figures:
    names = ("loss.gradient",) if args.loss_type == "sft_loss" else ("loss.gradient", "loss.entropy_gradient")
    return {name: one.tolist() for name, one in zip(names, found, strict=False)}


if __name__ == "__main__":
    answer_all(prepare, figures)
