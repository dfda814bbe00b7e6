"""A resolved configuration loads again, to the same values: a run's config.yaml is a configuration."""

from __future__ import annotations

import pytest
import yaml

from roll_batching.jobs.config import config_from_dict, load_config
from tests.jobs.config.jobs import changed

DYNAMIC = {
    "actor_train.use_sequence_packing": False,
    "actor_train.max_tokens_per_microbatch_in_train": 512,
    "reference.max_tokens_per_microbatch_in_infer": 512,
}
ONE = {f"actor_train.{key}": value for key, value in {"infer_batch_size": 2, "logprob_plan": "own"}.items()}
SFT = {"task": "sft", "sequence_length": 64}
STREAM = {**SFT, "train": {"max_num_steps": 7, "train_policy": {"enable_dp_load_balancing": True}}}
WARMUP = {"file_name": "corpus.jsonl"}
FORMS = {
    "short form of dynamic batching": {**DYNAMIC, "actor_train.use_dynamic_batching": True},
    "short form in all roles": {
        **DYNAMIC,
        "actor_train.use_dynamic_batching": True,
        "reference.use_dynamic_batching": True,
    },
    "short form that says no": {"actor_train.use_dynamic_batching": False},
    "short form beside a long one": {
        **DYNAMIC,
        "actor_train.use_dynamic_batching": True,
        "actor_train.use_dynamic_batching_in_train": True,
    },
    "dynamic in training alone": {**DYNAMIC, "actor_train.use_dynamic_batching_in_train": True},
    "dynamic without gradient alone": {
        **DYNAMIC,
        "actor_train.use_dynamic_batching_in_infer": True,
        "actor_train.max_tokens_per_microbatch_in_infer": 512,
    },
    "packing without a cap": {
        "prompt_length": 32,
        "sequence_length": 64,
        "actor_train.sequence_packing_args": {},
        "reference.use_sequence_packing": True,
    },
    "padded": {"actor_train.use_sequence_packing": False, **ONE},
    "lengths, response": {"prompt_length": 8, "response_length": 8},
    "lengths, whole": {"prompt_length": 8, "sequence_length": 20},
    "lengths, new tokens": {"prompt_length": 8, "actor_infer.generating_args.max_new_tokens": 4},
    "lengths, all": {"prompt_length": 8, "response_length": 8, "sequence_length": 20},
    "max_grad_norm": {"max_grad_norm": 0.5},
    "reward_norm": {"adv_estimator": "reinforce", "reward_norm": "group"},
    "reward_norm, shifted": {"adv_estimator": "reinforce", "reward_norm": "batch", "reward_shift": True},
    "reward_norm, scaled": {"adv_estimator": "reinforce", "reward_norm": "batch", "reward_scale": True},
    "no norms": {"adv_estimator": "reinforce", "norm_mean_type": None, "norm_std_type": None},
    "group of generating_args": {"actor_infer.generating_args.num_return_sequences": 4},
    "group of the job": {"num_return_sequences_in_group": 4, "actor_infer.generating_args.num_return_sequences": 2},
    "clip range": {"use_pg_clip_range": True, "pg_clip_low": 0.1, "pg_clip_high": 0.3},
    "warm-up by steps": {"warmup": {**WARMUP, "training_args": {"max_steps": 3}}},
    "warm-up by epochs": {"warmup": {**WARMUP, "num_train_epochs": 2}},
    "sft by steps": {**SFT, "max_steps": 3},
    "sft by epochs": {**SFT, "num_train_epochs": 2},
    "sft over a stream": STREAM,
    "sft over a stream, packed": {**STREAM, "train": {**STREAM["train"], "sequence_packing": True}},
    "a stream that is off": {**SFT, "train": {"max_num_steps": 7}},
    "dpo": {"task": "dpo", "sequence_length": 64, "actor_train.training_args.per_device_train_batch_size": 2},
    "asynchronous": {"async_generation_ratio": 1},
    "asynchronous, corrected": {"async_generation_ratio": 1, "loss_args": {"engine_ratio_cap": 2.0}},
    "pipeline of other roles": {
        "actor_train.strategy_args.strategy_config.pipeline_model_parallel_size": 2,
        "actor_train.strategy_args.strategy_config.virtual_pipeline_model_parallel_size": 2,
        "reference.strategy_args.strategy_config": {"pipeline_model_parallel_size": 1},
    },
    "numbers in environments": {"system_envs": {"A": 10}, "actor_train.system_envs": {"B": "010", "C": "1:30"}},
    "empty sections": {"actor_train.training_args": None, "actor_infer": None},
    "own devices": {"actor_train.device_mapping": "0-3", "actor_infer.device_mapping": "4-7"},
}


@pytest.mark.parametrize("form", FORMS)
def test_a_resolved_configuration_loads_again(tmp_path, form):
    again(tmp_path, config_from_dict(changed(FORMS[form])))


def again(tmp_path, job):
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(job.to_dict(), sort_keys=False))
    other = load_config(file)
    assert other.to_dict() == job.to_dict()
    assert other.actor_train.batching() == job.actor_train.batching()
    for name, role in job.roles.items():
        assert [role.mode_of(kind) for kind in ("train", "infer")] == [
            other.roles[name].mode_of(kind) for kind in ("train", "infer")
        ]
