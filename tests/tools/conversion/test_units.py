"""Counts of other frameworks in the unit of ours: learning rates of converted files beside the frameworks' formulas."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from roll_batching.jobs.config import JobConfig
from tests.tools.conversion import test_nemo_rl_defaults as nemo_rl
from tests.tools.conversion import test_slime as slime
from tests.tools.conversion import test_verl as verl
from tests.tools.conversion.test_critics import critic_of, ppo_file
from tests.tools.conversion.test_nemo_rl_policy import reasons

pytestmark = pytest.mark.config

A = verl.A
GAE = "algorithm.adv_estimator=gae"
RANKS = 8


def rates_of(args: Any, steps: int) -> list[float]:
    """The learning rates of the first `steps` optimizer steps, of Megatron's own schedule."""
    torch = pytest.importorskip("torch")
    from roll_batching.modeling.builder import build_scheduler

    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    optimizer.param_groups[0] |= {"is_decoupled_lr": False, "wd_mult": 1.0, "lr_mult": 1.0}
    scheduler, rates = build_scheduler(optimizer, args, args.max_steps), []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step(1)
    return rates


def policy_rates(job: JobConfig, steps: int) -> list[float]:
    from roll_batching.jobs.objectives.from_config import schedule_of

    return rates_of(schedule_of(job, job.dp_size(job.world_size or 1)), steps)


def critic_rates(job: JobConfig, steps: int) -> list[float]:
    from roll_batching.jobs.objectives.from_config import critic_role

    return rates_of(critic_role(job, job.dp_size(job.world_size or 1)).training_args, steps)


def verl_cosine(step: int, warmup: int, total: int, lowest: float) -> float:
    """`get_cosine_schedule_with_warmup` of verl/utils/torch_functional.py."""
    if step < warmup:
        return step / max(1, warmup)
    progress = (step - warmup) / max(1, total - warmup)
    return max(lowest, math.cos(math.pi * progress) * (1 - lowest) / 2 + (1 + lowest) / 2)


def linear(step: int, warmup: int, decay: int, first: float = 0.0) -> float:
    """Megatron's linear schedule from `first` to 1 to 0."""
    if warmup and step <= warmup:
        return first + (1 - first) * step / warmup
    return max(0.0, 1 - (step - warmup) / (decay - warmup))


BATCH = f"data.train_batch_size=128 {A}.ppo_mini_batch_size=32 {A}.ppo_epochs=2 {A}.optim.lr=1"
MEGATRON = "model_engine=megatron"
OF_VERL: dict[str, tuple[str, Callable[[int], float]]] = {
    "FSDP, warm-up": (f"{A}.optim.lr_warmup_steps=5", lambda step: min(1.0, step / 5)),
    "FSDP, a share": (f"{A}.optim.lr_warmup_steps_ratio=0.27", lambda step: min(1.0, step / 5)),
    "FSDP, a share that is rounded to nothing": (f"{A}.optim.lr_warmup_steps_ratio=0.04", lambda step: 1.0),
    "FSDP, cosine": (
        f"{A}.optim.lr_warmup_steps=3 {A}.optim.lr_scheduler_type=cosine {A}.optim.min_lr_ratio=0.1",
        lambda step: verl_cosine(step, 3, 20, 0.1),
    ),
    "Megatron, warm-up": (
        f"{MEGATRON} {A}.optim.lr_warmup_steps=5 {A}.optim.lr_warmup_init=0.25",
        lambda step: min(1.0, 0.25 + 0.75 * step / 5),
    ),
    "Megatron, its own length": (
        f"{MEGATRON} {A}.optim.lr_warmup_steps_ratio=0.2 {A}.optim.lr_decay_steps=10 {A}.optim.lr_decay_style=linear",
        lambda step: linear(step, 2, 10),
    ),
    "Megatron, the job's length": (
        f"{MEGATRON} {A}.optim.lr_warmup_steps=2 {A}.optim.lr_decay_style=linear",
        lambda step: linear(step, 2, 20),
    ),
}


@pytest.mark.parametrize("name", OF_VERL)
def test_verls_schedule_counts_rl_steps(tmp_path: Path, name: str) -> None:
    options, rate = OF_VERL[name]
    job = verl.job_of(verl.converted(tmp_path, f"{BATCH} {options}"), tmp_path)
    each = 4 * 2  # mini-batches x passes
    rates = policy_rates(job, 20 * each)
    assert rates[::each] == pytest.approx([rate(step) for step in range(20)], rel=1e-6, abs=1e-9)


def test_verls_critic_counts_rl_steps_with_its_own_mini_batches(tmp_path: Path) -> None:
    options = (
        f"{MEGATRON} {GAE} critic.ppo_mini_batch_size=16 critic.ppo_epochs=3 critic.optim.lr=1 "
        "critic.optim.lr_warmup_steps=4 critic.optim.lr_decay_steps=12 critic.optim.lr_decay_style=linear "
        f"trainer.critic_warmup=5 {A}.optim.lr_warmup_steps_ratio=0.1 {A}.optim.lr_decay_style=linear"
    )
    job = verl.job_of(verl.converted(tmp_path, f"{BATCH} {options}"), tmp_path)
    rates = critic_rates(job, 20 * 24)
    assert rates[::24] == pytest.approx([linear(step, 4, 12) for step in range(20)], rel=1e-6, abs=1e-9)
    # The actor is trained in the steps 5 to 20, and its schedule spans 20 (0-based: 16 of its steps are made).
    assert job.critic_warmup == 4
    assert policy_rates(job, 16 * 8)[::8] == pytest.approx([linear(step, 2, 20) for step in range(16)], rel=1e-6)


def test_parts_of_an_rl_step_count_in_verls_asynchronous_trainer(tmp_path: Path) -> None:
    mode = "trainer.v1.trainer_mode=separate_async trainer.v1.separate_async.parameter_sync_step=4"
    options = f"{BATCH} {mode} {A}.optim.lr_warmup_steps_ratio=0.25"
    job = verl.job_of(verl.converted(tmp_path, options), tmp_path)
    assert job.actor_train.training_args.warmup_steps == 20 * 2, "20 of 80 parts, of two passes over one mini-batch"


def test_verls_sft_trainer_counts_optimizer_steps(tmp_path: Path) -> None:
    options = "optim.lr_warmup_steps=7 data.train_batch_size=64 model.path=/m"
    job = verl.job_of(verl.converted(tmp_path, options, "sft_trainer"), tmp_path)
    assert job.actor_train.training_args.warmup_steps == 7
    assert "optimizer steps of" not in verl.converted(tmp_path, options, "sft_trainer").to_yaml()


def test_a_count_says_its_unit(tmp_path: Path) -> None:
    done = verl.converted(tmp_path, f"{BATCH} {A}.optim.lr_warmup_steps=5")
    assert "5 x 8 optimizer steps of an RL step" in done.to_yaml()


def test_a_share_of_an_unknown_number_of_steps_stays_a_share(tmp_path: Path) -> None:
    options = f"{BATCH} {A}.optim.lr_warmup_steps_ratio=0.1 trainer.total_training_steps=null"
    args = verl.converted(tmp_path, options).settings["actor_train"]["training_args"]
    assert args["warmup_ratio"] == 0.1 and "warmup_steps" not in args


def megatron_of(scheduler: dict[str, Any], lr: float = 1.0) -> dict[str, Any]:
    return {"enabled": True, "optimizer": {"lr": lr}, "scheduler": {"lr_decay_style": "constant"} | scheduler}


def with_policy(task: str, sections: dict[str, Any] | None = None, **policy: Any) -> dict[str, Any]:
    file = nemo_rl.file_of(task, **(sections or {}))
    file["policy"] |= policy
    return file


GRPO = {"grpo": {"num_prompts_per_step": 8, "num_generations_per_prompt": 4, "max_num_steps": 20}}
LINEAR_LR = {"name": "torch.optim.lr_scheduler.LinearLR"}
TORCH_RATE = {"name": "torch.optim.AdamW", "kwargs": {"lr": 1.0}}


def test_nemo_rls_warm_up_begins_at_its_rate(tmp_path: Path) -> None:
    """sft.yaml of NeMo-RL: from 4.9999e-6 to 5e-6, which is constant in effect."""
    megatron = megatron_of({"lr_warmup_iters": 50, "lr_warmup_init": 4.9999e-6}, 5e-6)
    job = nemo_rl.job_of(tmp_path, with_policy("sft", megatron_cfg=megatron))
    args = job.actor_train.training_args.model_copy(update={"max_steps": 60})
    expected = [4.9999e-6 + 1e-10 * min(step, 50) / 50 for step in range(60)]
    assert rates_of(args, 60) == pytest.approx(expected, rel=1e-9)


def test_torchs_warm_up_begins_at_its_factor(tmp_path: Path) -> None:
    schedules = [LINEAR_LR | {"kwargs": {"start_factor": 0.1, "end_factor": 1.0, "total_iters": 5}}]
    file = with_policy("grpo", GRPO, train_global_batch_size=8, optimizer=TORCH_RATE, scheduler=schedules)
    torch = pytest.importorskip("torch")
    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=1.0)
    theirs, scheduler = [], torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=5)
    for _ in range(20):
        theirs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    rates = policy_rates(nemo_rl.job_of(tmp_path, file), 20 * 4)
    assert rates[::4] == pytest.approx(theirs, rel=1e-6), "a step of the schedule is a pass over a rollout"


def test_a_cosine_after_torchs_warm_up_is_converted(tmp_path: Path) -> None:
    cosine = {"name": "torch.optim.lr_scheduler.CosineAnnealingLR", "kwargs": {"T_max": 15, "eta_min": 0.1}}
    linear_lr = LINEAR_LR | {"kwargs": {"start_factor": 0.02, "end_factor": 1.0, "total_iters": 5}}
    scheduler = [linear_lr, cosine, {"milestones": [5]}]
    file = with_policy("grpo", GRPO, train_global_batch_size=8, optimizer=TORCH_RATE, scheduler=scheduler)
    rates = policy_rates(nemo_rl.job_of(tmp_path, file), 20 * 4)[::4]
    expected = [0.02 + 0.98 * step / 5 for step in range(5)]
    expected += [0.1 + 0.9 * (1 + math.cos(math.pi * step / 15)) / 2 for step in range(15)]
    assert rates == pytest.approx(expected, rel=1e-6)


def test_a_warm_up_that_another_schedule_cuts_off_is_left_out(tmp_path: Path) -> None:
    constant = {"name": "torch.optim.lr_scheduler.ConstantLR", "kwargs": {"factor": 1.0, "total_iters": 9}}
    linear_lr = LINEAR_LR | {"kwargs": {"start_factor": 0.1, "total_iters": 50}}
    file = with_policy("sft", scheduler=[linear_lr, constant, {"milestones": [20]}])
    assert any(key.startswith("policy.scheduler (") for key in reasons(tmp_path, file, "refused"))


def test_megatron_bridge_ends_a_warm_up_with_the_schedule(tmp_path: Path) -> None:
    file = with_policy("sft", {"sft": {"max_num_steps": 30}}, megatron_cfg=megatron_of({"lr_warmup_iters": 50}))
    assert nemo_rl.job_of(tmp_path, file).actor_train.training_args.warmup_steps == 30


def test_nemo_rls_value_model_has_its_own_length(tmp_path: Path) -> None:
    scheduler = {"lr_decay_style": "linear", "lr_warmup_iters": 3, "lr_decay_iters": 12, "lr_warmup_init": 0.5}
    file = ppo_file({"num_prompts_per_step": 16, "num_generations_per_prompt": 4, "ppo_epochs": 2})
    file["value"] |= {"megatron_cfg": megatron_of(scheduler), "train_global_batch_size": 16}
    rates = critic_rates(nemo_rl.job_of(tmp_path, file), 20 * 4)
    assert rates[::4] == pytest.approx([linear(step, 3, 12, 0.5) for step in range(20)], rel=1e-6, abs=1e-9)
    assert critic_of(nemo_rl.job_of(tmp_path, file)).training_args.max_steps == 12 * 4


def test_nemo_rls_default_leaves_one_out(tmp_path: Path) -> None:
    assert nemo_rl.job_of(tmp_path, nemo_rl.file_of("grpo")).adv_estimator == "grpo_leave_one_out"


@pytest.mark.parametrize("path", ["${oc.env:NO_SUCH_VARIABLE}", "someone/on-the-hub", None])
def test_keys_of_lines_are_kept_without_a_file(tmp_path: Path, path: str | None) -> None:
    train = {"data_path": path, "input_key": "question", "output_key": "solution"}
    data = {"train": train, "default": {"dataset_name": "ResponseDataset", "env_name": "math"}}
    done = nemo_rl.converted(tmp_path, nemo_rl.file_of("grpo", data=data))
    texts = done.settings["actor_train"]["data_args"]
    assert (texts["prompt"], texts["response"]) == ("question", "solution")
    assert "data.train.input_key" in {one.key for one in done.kept} and "file_name" not in texts


def test_keys_of_pairs_are_kept_without_a_file(tmp_path: Path) -> None:
    data = {"train": {"data_path": "${oc.env:NO_SUCH_VARIABLE}", "chosen_key": "better", "rejected_key": "worse"}}
    done = nemo_rl.converted(tmp_path, nemo_rl.file_of("dpo", data=data))
    texts = done.settings["actor_train"]["data_args"]
    assert (texts["chosen"], texts["rejected"], texts["prompt"]) == ("better", "worse", "prompt")


def test_other_keys_of_texts_are_told_without_a_file(tmp_path: Path) -> None:
    train = {"dataset_name": "openai_format", "data_path": "${oc.env:NO_SUCH_VARIABLE}", "chat_key": "turns"}
    train |= {"tool_key": "functions", "system_key": "rules"}
    data = {"train": train, "validation": {**train, "chat_key": "others"}}
    done = nemo_rl.converted(tmp_path, nemo_rl.file_of("sft", data=data))
    assert done.settings["actor_train"]["data_args"]["tools"] == "functions"
    refused = slime.left_out(done, "refused")
    assert "NO_SUCH_VARIABLE" in refused["data.train.data_path"]
    assert "data_args.system" in refused["data.train.system_prompt_file"]
    assert "'messages': 'others'" in refused["data.validation"]


def test_verls_sum_of_tokens_has_no_divisor(tmp_path: Path) -> None:
    done = verl.converted(tmp_path, f"{A}.loss_agg_mode=token-sum {A}.loss_scale_factor=100")
    job = verl.job_of(done, tmp_path)
    assert (job.loss_agg_mode, job.loss_agg_length) == ("token-sum", None)
    assert "does not read it" in slime.left_out(done, "idle")[f"{A}.loss_scale_factor"]
    done = verl.converted(tmp_path, f"{A}.loss_agg_mode=seq-mean-token-sum-norm")
    assert "micro-batch" in {one.key: one.meaning for one in done.changed}[f"{A}.loss_agg_mode"]
    done = verl.converted(tmp_path, f"{A}.loss_agg_mode=seq-mean-token-sum-norm {A}.loss_scale_factor=100")
    assert verl.job_of(done, tmp_path).loss_agg_length == 100
    assert f"{A}.loss_agg_mode" not in {one.key for one in done.changed}


def test_slimes_sft_counts_rollouts(tmp_path: Path) -> None:
    """slime trains a rollout of texts in rollout-batch-size / global-batch-size optimizer steps."""
    options = "--loss-type sft_loss --global-batch-size 4 --save ./out --save-interval 3 --lr-warmup-iters 5"
    job = slime.job_of(slime.converted(tmp_path, options), tmp_path)
    assert (job.max_steps, job.save_steps, job.actor_train.training_args.warmup_steps) == (40, 12, 5)


def test_slimes_rl_counts_rollouts_and_optimizer_steps(tmp_path: Path) -> None:
    options = (
        "--global-batch-size 32 --n-samples-per-prompt 8 --save ./out --save-interval 3 --lr 1 --lr-decay-style linear "
        "--lr-warmup-iters 4 --lr-decay-iters 40 --lr-warmup-init 0.5"
    )
    job = slime.job_of(slime.converted(tmp_path, options), tmp_path)
    assert (job.max_steps, job.save_steps) == (10, 3)
    assert policy_rates(job, 40) == pytest.approx([linear(step, 4, 40, 0.5) for step in range(40)], rel=1e-6)


def test_a_first_rate_above_the_peak_or_without_warm_up_is_reported(tmp_path: Path) -> None:
    above = megatron_of({"lr_warmup_iters": 5, "lr_warmup_init": 2.0})
    refused = reasons(tmp_path, with_policy("sft", megatron_cfg=above), "refused")
    assert "above learning_rate, 1" in refused["policy.megatron_cfg.scheduler.lr_warmup_init"]
    idle = reasons(
        tmp_path, with_policy("sft", megatron_cfg=megatron_of({"lr_warmup_iters": 0, "lr_warmup_init": 0.1})), "idle"
    )
    assert "there is no warm-up" in idle["policy.megatron_cfg.scheduler.lr_warmup_init"]
