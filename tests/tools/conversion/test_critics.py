"""Critics of NeMo-RL, verl and slime: their own defaults, and optimizer steps that are the same."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from roll_batching.errors import ConfigError
from roll_batching.jobs.config import load_config
from roll_batching.jobs.config.job import JobConfig
from roll_batching.jobs.config.worker import WorkerConfig
from roll_batching.tools.conversion import Conversion
from tests.tools.conversion import test_nemo_rl_defaults as nemo_rl
from tests.tools.conversion import test_slime as slime
from tests.tools.conversion import test_verl as verl

pytestmark = pytest.mark.config

VALUE: dict[str, Any] = {
    "model_name": "models/small",
    "tokenizer": {"name": "models/small"},
    "train_global_batch_size": 32,
    "train_micro_batch_size": 4,
    "max_total_sequence_length": 512,
    "precision": "bfloat16",
    "dtensor_cfg": {"enabled": True, "tensor_parallel_size": 1, "activation_checkpointing": True},
    "megatron_cfg": {"enabled": False},
    "max_grad_norm": 0.5,
    "optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-5}},
    "sequence_packing": {"enabled": False},
}


def ppo_file(ppo: dict[str, Any] | None = None, **sections: Any) -> dict[str, Any]:
    """A short PPO file of NeMo-RL."""
    file = nemo_rl.file_of("grpo")
    del file["grpo"]
    return copy.deepcopy(file | {"ppo": {"max_num_steps": 20, **(ppo or {})}, "value": VALUE} | sections)


def critic_of(job: JobConfig) -> WorkerConfig:
    assert job.critic is not None
    return job.critic


def test_nemo_rls_own_defaults(tmp_path: Path) -> None:
    job = nemo_rl.job_of(tmp_path, ppo_file())
    assert (job.adv_estimator, job.gamma, job.lambd, job.whiten_advantages) == ("gae", 1, 0.95, True)
    assert (job.ppo_epochs, job.critic_epochs, job.critic_warmup, job.value_clip) == (4, 4, 0, None)
    assert (job.rollout_batch_size, job.num_return_sequences_in_group, job.eval_steps) == (32, 16, 20)
    critic = critic_of(job)
    args = critic.training_args
    assert (args.learning_rate, args.weight_decay, args.max_grad_norm, args.adam_epsilon) == (1e-5, 0.01, 0.5, 1e-8)
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (4, 4), "32 rows on 2 ranks"
    assert critic.model_args.value_head_std == 0.02 and critic.model_args.model_name_or_path == "models/small"
    assert critic.strategy_args.strategy_config.recompute_granularity == "full", "activation_checkpointing"
    assert not critic.use_sequence_packing and job.actor_train.use_sequence_packing


def test_nemo_rls_value_loss_with_a_scale_has_the_same_steps(tmp_path: Path) -> None:
    """AdamW with clipping on 0.4 x the loss, and with the converted settings on the loss: the same weights."""
    job = nemo_rl.job_of(tmp_path, ppo_file(value_loss_fn={"scale": 0.4, "cliprange": 0.2}))
    converted = critic_of(job).training_args
    assert job.value_clip == 0.2 and converted.max_grad_norm == pytest.approx(1.25)
    weights = []
    for scale, norm, epsilon in ((0.4, 0.5, 1e-8), (1.0, converted.max_grad_norm, converted.adam_epsilon)):
        weight = torch.linspace(-1, 1, 8, dtype=torch.float64).requires_grad_()
        optimizer = torch.optim.AdamW([weight], lr=0.05, eps=epsilon, weight_decay=0.01)
        for step in range(12):
            inputs = torch.sin(torch.arange(8, dtype=torch.float64) * (step + 1))
            loss = scale * ((weight * inputs).sum() - step) ** 2 * (1 if step % 2 else 1e-9)  # clipped, and tiny
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_([weight], norm)
            optimizer.step()
        weights.append(weight.detach())
    assert torch.allclose(*weights, rtol=0, atol=1e-6)


CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "lambdas": ({"adv_estimator": {"name": "gae", "gae_lambda_value": 1.0, "gae_lambda_policy": 1}}, {}, {"lambd": 1}),
    "warm-up of the policy": ({"policy_training_start_step": 5}, {}, {"critic_warmup": 5}),
    "passes": ({"ppo_epochs": 2}, {}, {"ppo_epochs": 2, "critic_epochs": 2}),
    "no whitening": (
        {"adv_estimator": {"name": "gae", "normalize_advantages": False}},
        {},
        {"whiten_advantages": False},
    ),
    "overlong": ({"overlong_filtering": True}, {}, {"max_len_mask": True}),
    "no clip": ({}, {"value_loss_fn": {"cliprange": 0}}, {"value_clip": None}),
    "KL in the reward": (
        {"skip_reference_policy_logprobs_calculation": False},
        {"loss_fn": {"use_kl_in_reward": True, "reference_policy_kl_penalty": 0.02, "reference_policy_kl_type": "k1"}},
        {"add_token_level_kl": True, "init_kl_coef": 0.02, "kl_penalty": "k1", "use_kl_loss": False},
    ),
    "no KL without a reference": (
        {},
        {"loss_fn": {"use_kl_in_reward": True, "reference_policy_kl_penalty": 0.02}},
        {"add_token_level_kl": False, "use_kl_loss": False},
    ),
    "asynchronous": (
        {"async_ppo": {"enabled": True, "max_trajectory_age_steps": 2}},
        {"loss_fn": {"use_importance_sampling_correction": True}},
        {"async_generation_ratio": 2},
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_nemo_rls_keys(tmp_path: Path, case: str) -> None:
    ppo, sections, expected = CHANGES[case]
    job = nemo_rl.job_of(tmp_path, ppo_file(ppo, **sections))
    assert {key: getattr(job, key) for key in expected} == expected


def test_nemo_rls_schedule_counts_passes_over_a_rollout(tmp_path: Path) -> None:
    """512 samples: the policy makes 8 optimizer steps a pass, the critic 16; both warm up over 10 passes."""
    megatron = {
        "enabled": True,
        "tensor_model_parallel_size": 2,
        "optimizer": {"lr": 2e-6, "clip_grad": 0.7},
        "scheduler": {"lr_decay_style": "constant", "lr_warmup_iters": 10},
    }
    file = ppo_file()
    file["policy"]["megatron_cfg"] = copy.deepcopy(megatron)
    file["value"]["megatron_cfg"] = {**copy.deepcopy(megatron), "tensor_model_parallel_size": 1}
    for section in ("policy", "value"):
        file[section]["dtensor_cfg"] = {"enabled": False}
    done = nemo_rl.converted(tmp_path, file)
    (tmp_path / "job.yaml").write_text(done.to_yaml())
    job = load_config(tmp_path / "job.yaml")
    critic = critic_of(job)
    assert (job.actor_train.training_args.warmup_steps, critic.training_args.warmup_steps) == (80, 160)
    assert (critic.training_args.learning_rate, critic.training_args.max_grad_norm) == (2e-6, 0.7)
    assert critic.model_args.value_head_std == 0.01
    assert critic.strategy_args.strategy_config.tensor_model_parallel_size == 2, "the policy's sizes"
    left = slime.left_out(done)
    assert "parallel sizes" in left["value.megatron_cfg.tensor_model_parallel_size"]


def test_nemo_rls_keys_have_the_names_of_the_file(tmp_path: Path) -> None:
    """No key is reported under the section that PPO is translated as, and none of the file's is lost."""
    done = nemo_rl.converted(tmp_path, ppo_file({"made_up": 1, "async_ppo": {"enabled": False}}))
    keys = [one.key for part in (done.kept, done.changed, done.defaults, done.left_out) for one in part]
    assert not [key for key in keys if key.split(".")[0] == "grpo"]
    assert {"ppo.max_num_steps", "ppo.made_up", "ppo.async_ppo", "value.train_micro_batch_size"} <= set(keys)
    defaults = {one.key for one in done.defaults}
    assert "value.optimizer.kwargs.lr" in keys and "ppo.adv_estimator.normalize_advantages" in defaults


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "two lambdas": (
        {"adv_estimator": {"name": "gae", "gae_lambda_value": 1.0}},
        {},
        "ppo.adv_estimator.gae_lambda_value",
        "one lambda",
    ),
    "a lambda per length": (
        {"adv_estimator": {"name": "gae", "length_adaptive_alpha": 0.05}},
        {},
        "ppo.adv_estimator.length_adaptive_alpha",
        "all lengths",
    ),
    "another mean": ({}, {"loss_fn": {"token_level_loss": False}, "value_loss_fn": {}}, "value_loss_fn", "both losses"),
    "a loss of correct samples": (
        {},
        {"loss_fn": {"positive_example_nll_weight": 0.1}},
        "loss_fn.positive_example_nll_weight",
        "correct samples",
    ),
    "no scale": ({}, {"value_loss_fn": {"scale": 0}}, "value_loss_fn.scale", "would not learn"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_train_otherwise_is_refused_by_name(tmp_path: Path, case: str) -> None:
    ppo, sections, key, why = REFUSED[case]
    assert why in slime.left_out(nemo_rl.converted(tmp_path, ppo_file(ppo, **sections)), "refused")[key]


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "sections",
    [
        {"value": [1]},
        {"value": {**VALUE, "train_micro_batch_size": "four"}},
        {"value": {**VALUE, "optimizer": {"name": "torch.optim.AdamW", "kwargs": 3}}},
        {"value_loss_fn": {"scale": "0.4"}},
        {"value_loss_fn": {"cliprange": float("nan")}},
        {"value_loss_fn": 3},
        {"ppo": 3},
        {"ppo": {"ppo_epochs": 0}},
        {"ppo": {"val_period": "often"}},
    ],
)
def test_values_of_the_wrong_kind_are_one_error_or_left_out(tmp_path: Path, sections: dict[str, Any]) -> None:
    try:
        done = nemo_rl.converted(tmp_path, ppo_file() | sections)
    except ConfigError as error:
        assert "Traceback" not in str(error) and "file.yaml" in str(error)
    else:
        assert isinstance(done, Conversion)


# ---- verl


GAE = "algorithm.adv_estimator=gae"


def test_verls_own_defaults(tmp_path: Path) -> None:
    done = verl.converted(tmp_path, f"{GAE} {verl.A}.ppo_epochs=2 critic.ppo_micro_batch_size_per_gpu=8")
    job = verl.job_of(done, tmp_path)
    assert (job.gamma, job.lambd, job.whiten_advantages, job.value_clip) == (1.0, 1.0, True, 0.5)
    assert (job.critic_warmup, job.ppo_epochs, job.critic_epochs) == (0, 2, 2)
    critic = critic_of(job)
    args, layout = critic.training_args, critic.strategy_args.strategy_config
    assert (args.learning_rate, args.weight_decay, args.max_grad_norm) == (1e-5, 0.01, 1.0)
    assert args.per_device_train_batch_size * args.gradient_accumulation_steps * 8 == 256 * 4, "the actor's mini-batch"
    assert layout.recompute_granularity == "full" and layout.use_distributed_optimizer
    assert critic.model_args.value_head_std == 0.02
    assert critic.model_args.model_name_or_path == "~/models/deepseek-llm-7b-chat", "verl's default"


def test_verls_critic_has_its_own_settings(tmp_path: Path) -> None:
    done = verl.converted(
        tmp_path,
        f"{GAE} algorithm.lam=0.9 algorithm.gamma=0.99 trainer.critic_warmup=3 critic.cliprange_value=0.3 "
        "critic.model.path=/m critic.use_dynamic_bsz=True critic.ppo_max_token_len_per_gpu=9000 critic.ppo_epochs=3 "
        "critic.forward_max_token_len_per_gpu=12000 critic.optim.lr=3e-5 critic.optim.lr_warmup_steps_ratio=0.05 "
        "critic.ppo_mini_batch_size=128 critic.model.enable_gradient_checkpointing=False "
        "critic.model.fsdp_config.param_offload=True critic.made_up=1",
    )
    job = verl.job_of(done, tmp_path)
    assert (job.lambd, job.gamma, job.value_clip, job.critic_epochs) == (0.9, 0.99, 0.3, 3)
    assert job.critic_warmup == 2, "verl trains the actor in the step of this number"
    critic = critic_of(job)
    packing, args = critic.sequence_packing_args, critic.training_args
    assert critic.use_sequence_packing and packing.max_packed_sequence_length_train == 9000
    assert packing.max_packed_sequence_length_forward == 12000
    assert (args.learning_rate, args.warmup_steps) == (3e-5, 24), "1 of 20 RL steps: 3 passes over 8 mini-batches"
    assert args.per_device_train_batch_size * args.gradient_accumulation_steps * 8 == 128 * 4
    assert critic.model_args.model_name_or_path == job.actor_train.model_args.model_name_or_path
    assert critic.strategy_args.strategy_config.recompute_granularity is None
    assert "critic.made_up" in slime.left_out(done, "unknown")
    assert any(key.startswith("critic.model.fsdp_config") for key in slime.left_out(done, "idle"))


def test_verls_megatron_critic_has_the_actors_layout(tmp_path: Path) -> None:
    sizes = f"{verl.A}.megatron.tensor_model_parallel_size=2 critic.megatron.tensor_model_parallel_size=4"
    done = verl.converted(tmp_path, f"model_engine=megatron {GAE} {sizes} critic.ppo_micro_batch_size_per_gpu=2")
    critic = critic_of(verl.job_of(done, tmp_path))
    assert critic.strategy_args.strategy_config.tensor_model_parallel_size == 2
    assert critic.training_args.gradient_accumulation_steps == 256 * 4 // (2 * 4), "four data-parallel ranks"
    assert critic.model_args.value_head_std == 0.01
    assert "parallel sizes" in slime.left_out(done, "idle")["critic.megatron.tensor_model_parallel_size"]


def test_verls_kl_in_the_reward(tmp_path: Path) -> None:
    done = verl.converted(tmp_path, f"{GAE} algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.01")
    job = verl.job_of(done, tmp_path)
    assert (job.add_token_level_kl, job.init_kl_coef, job.kl_penalty) == (True, 0.01, "kl")


def test_a_setting_of_verls_critic_that_cannot_be_read_is_named_where_it_counts(tmp_path: Path) -> None:
    words = "critic.optim.lr=$(cat lr)"
    left = slime.left_out(verl.converted(tmp_path, f"{GAE} {words}"), "refused")
    assert "critic.optim.lr" in left
    assert "critic.optim.lr" not in slime.left_out(verl.converted(tmp_path, words), "refused"), "there is no critic"


# ---- slime


def test_slimes_critic_has_the_actors_settings_and_slimes_defaults(tmp_path: Path) -> None:
    done = slime.converted(
        tmp_path,
        "--advantage-estimator ppo --n-samples-per-prompt 4 --global-batch-size 32 --lr 2e-6 --use-dynamic-batch-size "
        "--max-tokens-per-gpu 4096 --num-critic-only-steps 2 --normalize-advantages --gamma 0.99 --lr-decay-iters 9 "
        "--calculate-per-token-loss",
    )
    job = slime.job_of(done, tmp_path)
    assert (job.adv_estimator, job.gamma, job.lambd, job.value_clip) == ("gae", 0.99, 1.0, 0.2)
    assert (job.critic_warmup, job.whiten_advantages, job.loss_agg_mode) == (2, True, "token-mean")
    critic, train = critic_of(job), job.actor_train
    args = critic.training_args
    assert (args.learning_rate, args.lr_scheduler_type, args.weight_decay) == (2e-6, "linear", 0.01)
    assert args.max_steps == train.training_args.max_steps == 9, "slime builds both schedules from the same options"
    assert (args.max_grad_norm, args.adam_epsilon) == (0.5, 5e-9), "slime's loss of the critic is not halved"
    assert args.gradient_accumulation_steps == train.training_args.gradient_accumulation_steps
    assert critic.sequence_packing_args.max_packed_sequence_length_train == 4096
    assert critic.model_args.value_head_std == 0.02


def test_slimes_settings_of_critics_are_left_out_by_name(tmp_path: Path) -> None:
    options = "--advantage-estimator ppo --kl-coef 0.1 --megatron-config-path c.yaml"
    left = slime.left_out(slime.converted(tmp_path, options), "refused")
    assert "returns" in left["--kl-coef"] and "section `critic`" in left["--megatron-config-path"]
