"""Nothing is ignored silently: each key of the schema is read by a job, refused, or told by a notice."""

from __future__ import annotations

import copy
import fnmatch
import typing
from collections.abc import Callable
from typing import Any, Literal

import pytest

from roll_batching.jobs.config import ConfigFileError, JobConfig, config_from_dict, load_config
from roll_batching.jobs.config.diagnostics import NoticeKind
from roll_batching.jobs.config.key_paths import ANY_NAME, SchemaKey, schema_keys
from tests.jobs.config.jobs import MODEL
from tests.support.tiny_job import with_changes

LAYOUT = "actor_train.strategy_args.strategy_config"
DATA = "actor_train.data_args"
SAMPLING = "actor_infer.generating_args"

TRAIN: dict[str, Any] = {
    "max_steps": 4,
    "sequence_length": 32,
    "tokenizer": {"vocabulary": "ab#", "eos_token": "#"},
    "actor_train": {
        "model_args": {"architecture": MODEL},
        "device_mapping": [0, 1],
        "data_args": {"file_name": "x.jsonl", "eval_file_name": "y.jsonl"},
        "use_sequence_packing": True,
        "sequence_packing_args": {"max_packed_sequence_length_train": 64},
    },
}
ROLLOUTS = {"rollout_batch_size": 8, "prompt_length": 16, "response_length": 16}
RL = {**ROLLOUTS, "reward_function": "exact_match", "num_return_sequences_in_group": 4}
PAIRS = {"actor_train.training_args": {"per_device_train_batch_size": 2}}
STREAM = {"max_num_steps": 3, "train_policy": {"enable_dp_load_balancing": True}}
ALL_ON = {
    "save_steps": 2,
    "reference": {},
    "use_kl_loss": True,
    "kl_loss_coef": 0.1,
    "add_token_level_kl": True,
    "target_kl": 0.1,
    "dual_clip_loss": True,
    "use_pg_clip_range": True,
    "pg_clip_low": 0.1,
    "difficulty_mask": True,
    "loss_agg_mode": "seq-mean-token-sum-norm",
    "track_with": "wandb",
    "rewards": {"one": {"reward_function": "exact_match"}},
    "reward_function": None,
    "warmup": {"file_name": "z.jsonl", "training_args": {"max_steps": 3}},
    f"{LAYOUT}.pipeline_model_parallel_size": 2,
    f"{LAYOUT}.virtual_pipeline_model_parallel_size": 2,
    "actor_train.training_args": {"lr_scheduler_type": "cosine"},
    "actor_infer.strategy_args": {"strategy_config": {"pipeline_model_parallel_size": 1}},
}
JOBS: dict[str, dict[str, Any]] = {
    "grpo": RL,
    "grpo, all on": {**RL, **ALL_ON},
    "grpo, dynamic sampling": {**RL, "dynamic_sampling": True},
    "grpo, greedy": {**RL, "num_return_sequences_in_group": 1, "adv_estimator": "reinforce",
                     SAMPLING: {"do_sample": False}},
    "grpo, without evaluation": {**RL, "eval_samples": 0},
    "grpo, of a function": {**RL, "reward_function": None, "rollout_function": "own:function"},
    "grpo, of seeds": {
        **RL, "reward_function": None, "rollout_function": "own:function",
        DATA: {"seeds": 9, "file_name": None, "eval_file_name": None},
    },
    "gpg": {**RL, "loss_function": "gpg", "adv_estimator": "gpg"},
    "ppo": {**RL, "adv_estimator": "gae", "critic": {"use_sequence_packing": True}},
    "asynchronous": {**RL, "async_generation_ratio": 1},
    "distill": {**ROLLOUTS, "task": "distill", "teacher": {"model_args": {"model_name_or_path": "big"}}},
    "sft": {"task": "sft"},
    "sft, without evaluation": {"task": "sft", f"{DATA}.eval_file_name": None},
    "sft, a stream": {"task": "sft", "train": STREAM},
    "sft, chats": {"task": "sft", f"{DATA}.messages": "messages"},
    "dpo": {"task": "dpo", **PAIRS},
    "kto": {"task": "kto", **PAIRS},
}  # fmt: skip


def job_of(name: str) -> dict[str, Any]:
    return with_changes(copy.deepcopy(TRAIN), JOBS[name], separator=".")


Condition = Callable[[JobConfig], bool]


def is_supervised(job: JobConfig) -> bool:
    return job.task in ("sft", "dpo", "kto")


def evaluates(job: JobConfig) -> bool:
    scored = is_supervised(job) or job.has_reward or job.rollout_function is not None
    data = job.actor_train.data_args
    return bool(job.eval_samples and (data.eval_file_name or data.seeds) and scored)


def has_stages(job: JobConfig) -> bool:
    return job.actor_train.strategy_args.strategy_config.pipeline_model_parallel_size > 1


def reads_norms(job: JobConfig) -> bool:
    return job.task == "grpo" and job.adv_estimator in ("grpo", "reinforce", "gae")


READ: list[tuple[Condition, str]] = [
    (
        lambda job: True,
        "task exp_name seed output_dir resume_from_checkpoint pretrain save_steps verify_checkpoint logging_steps "
        "sequence_length tokenizer.* max_grad_norm export_model *.data_args.file_name *.data_args.prompt "
        "*.data_args.messages *.data_args.tools *.data_args.chat actor_train.model_args.* actor_train.training_args.* "
        "actor_train.apply_loss_scale actor_train.backend_timeout actor_train.planning_args.*",
    ),
    (
        lambda job: job.stream is None,
        "max_steps actor_train.use_sequence_packing actor_train.sequence_packing_args.max_packed_sequence_length_train "
        "actor_train.sequence_packing_args.min_num_micro_batches_train "
        "actor_train.sequence_packing_args.share_prefixes actor_train.sequence_packing_args.pack_shapes",
    ),
    (
        lambda job: True,
        " ".join(
            f"{LAYOUT}.{key}"
            for key in (
                *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
                *("dynamic_context_parallel", "use_distributed_optimizer", "overlap_grad_reduce"),
                *("grad_reduce_in_fp32", "recompute_granularity", "transformer_impl", "calculate_per_token_loss"),
                *(
                    "mtp_num_layers",
                    "virtual_pipeline_model_parallel_size",
                    "cluster.*_rate",
                    "cluster.matmul_half_tokens",
                ),
            )
        ),
    ),
    (has_stages, f"{LAYOUT}.microbatch_group_size_per_vp_stage {LAYOUT}.pipeline_slices"),
    (lambda job: bool(job.save_steps), "save_total_limit async_save"),
    (evaluates, "eval_steps eval_samples actor_train.data_args.eval_file_name"),
    (lambda job: evaluates(job) and not is_supervised(job), "validation.generating_args.*"),
    (
        lambda job: is_supervised(job) and (evaluates(job) or job.stream is not None),
        "actor_train.sequence_packing_args.*_forward actor_train.use_dynamic_batching_in_* "
        "actor_train.sequence_length_round_in_*",
    ),
    (lambda job: is_supervised(job), "*.data_args.response *.data_args.chosen *.data_args.rejected *.data_args.label"),
    (lambda job: job.task == "sft", "actor_train.data_args.input_ids actor_train.data_args.token_cache"),
    (lambda job: job.stream is not None, "train.*"),
    (
        lambda job: not is_supervised(job),
        "rollout_samples rollout_batch_size num_return_sequences_in_group batch_balance is_offload_states "
        "prompt_length response_length actor_train.data_args.long_prompts actor_train.data_args.response "
        "actor_infer.generating_args.max_new_tokens "
        "actor_infer.generating_args.temperature actor_infer.generating_args.do_sample "
        "actor_infer.strategy_args.strategy_name ppo_epochs max_len_mask difficulty_mask async_generation_ratio "
        "control reward_function rollout_function loss_agg_mode "
        "actor_infer.strategy_args.strategy_config.*_parallel_size "
        "actor_infer.strategy_args.strategy_config.dynamic_context_parallel",
    ),
    (lambda job: job.actor_infer.generating_args.do_sample, "actor_infer.generating_args.top_?"),
    (
        lambda job: job.task == "grpo",
        "adv_estimator actor_train.logprob_plan actor_train.logprob_temperature reward_clip advantage_clip "
        "whiten_advantages gamma entropy_loss_coef dynamic_sampling use_kl_loss add_token_level_kl "
        "train_infer_correction.* reward_scaling.* overlong_buffer.*",
    ),
    (reads_norms, "norm_mean_type norm_std_type"),
    (lambda job: job.task == "grpo" and job.adv_estimator in ("reinforce", "gae"), "reward_norm"),
    (lambda job: job.task == "grpo" and not job.dynamic_sampling, "drop_zero_advantage_groups"),
    (lambda job: job.dynamic_sampling, "dynamic_sampling_max_batches dynamic_sampling_batch_size"),
    (lambda job: job.loss_function == "policy", "pg_clip use_pg_clip_range importance_sampling dual_clip_loss"),
    (lambda job: job.use_pg_clip_range, "pg_clip_low pg_clip_high"),
    (lambda job: job.dual_clip_loss, "dual_clip_ratio"),
    (lambda job: job.use_kl_loss, "kl_loss_coef kl_loss_bound"),
    (lambda job: job.add_token_level_kl, "kl_penalty init_kl_coef target_kl kl_horizon"),
    (lambda job: job.difficulty_mask, "difficulty_low_threshold difficulty_high_threshold"),
    (lambda job: job.loss_agg_mode.endswith("-norm"), "loss_agg_length"),
    (lambda job: job.has_reward, "reward_workers reward_timeout reward_memory reward_failure"),
    (lambda job: bool(job.rewards), "actor_train.data_args.tag"),
    (
        lambda job: job.rollout_function is not None,
        "rollout_function_timeout rollout_max_calls actor_train.data_args.seeds",
    ),
    (lambda job: job.asynchronous, "max_staleness in_flight_updates partial_rollout sampler_restarts rollout_timeout"),
    (lambda job: job.warmup is not None, "warmup.*"),
    (lambda job: job.reference is not None, "reference.*"),
    (lambda job: job.critic is not None, "critic.* lambd value_clip critic_warmup critic_epochs"),
    (
        lambda job: job.task == "distill",
        "actor_infer.generating_args.num_return_sequences teacher.* logits_topk kd_objective "
        "kd_temperature teacher_temperature zero_outside_topk",
    ),
]
"""Jobs, and the keys that they read. A key may stand in several lines; `*` stands for any letters."""


def other_value(key: SchemaKey) -> Any:
    """A legal value that is not the default; None where there is none that can be told from the type."""
    annotation, default = key.field.annotation, None if key.field.is_required() else key.field.default
    members = (annotation, *typing.get_args(annotation))
    if bool in members:
        return not default
    choices = [c for one in members if typing.get_origin(one) is Literal for c in typing.get_args(one)]
    if other := [choice for choice in choices if choice != default]:
        return other[0]
    if int in members or float in members:
        limits = {type(item).__name__: getattr(item, type(item).__name__.lower(), None) for item in key.field.metadata}
        low, high = limits.get("Ge", limits.get("Gt", -1)), limits.get("Le", limits.get("Lt", 1e99))
        for value in (2 * (default or 0), 3, 2, 1, 0.3, (default or 0) / 2):
            whole = isinstance(value, int) or float in members
            if whole and value != default and low < value < high:
                return value
    return "other" if str in members else None


KEYS = [
    key
    for key in schema_keys()
    if key.section is None and ANY_NAME not in key.path and not {"architecture", "engine_args"} & set(key.path)
]
"""Keys with a value; those of a model's shape and of engines have tests of their own."""


def outcome(job: dict[str, Any], path: str, value: Any) -> tuple[str, JobConfig | None]:
    """Whether the job with `value` at `path` is refused, told that the key has no effect, told of, or silent."""
    try:
        config = config_from_dict(with_changes(copy.deepcopy(job), {path: value}, separator="."))
    except ConfigFileError:
        return "refused", None
    told = [notice for notice in config.notices if f"{path}.".startswith(f"{notice.path}.")]
    if not told:
        return "silent", config
    return ("told" if all(one.kind is NoticeKind.OTHER_EFFECT for one in told) else "idle"), config


def reads(config: JobConfig, path: str, *, by_name: bool = False) -> bool:
    """Whether the table says that `config` reads the key; `by_name`: without patterns."""
    patterns = [one for is_read, keys in READ if is_read(config) for one in keys.split()]
    return path in patterns if by_name else any(fnmatch.fnmatchcase(path, one) for one in patterns)


@pytest.mark.parametrize("name", JOBS)
def test_each_key_is_read_or_refused_or_told(name, report):
    job = job_of(name)
    config_from_dict(job)
    wrong, counts = [], dict.fromkeys(("refused", "idle", "told", "silent"), 0)
    for key in KEYS:
        value, path = other_value(key), ".".join(key.path)
        if value is None or value_at(job, key.path) == value:
            continue
        kind, config = outcome(job, path, value)
        counts[kind] += 1
        if kind == "silent" and not reads(config, path):
            wrong.append(f"{path}: {value!r} is neither read nor told")
        if kind == "idle" and reads(config, path, by_name=True):
            wrong.append(f"{path}: {value!r} is read, and told to have no effect")
    report(f"{name}: {counts}")
    assert not wrong, "\n".join(wrong)


def value_at(data: Any, path: tuple[str, ...]) -> Any:
    for part in path:
        data = data.get(part) if isinstance(data, dict) else None
    return data


PAIRS_OF_KEYS = {
    "a bound of a divergence that is not in the loss": ({"kl_loss_bound": 5.0}, "kl_loss_bound"),
    "a bound of k3 for k1": (
        {"reference": {}, "use_kl_loss": True, "kl_loss_coef": 0.1, "loss_args": {"kl_estimator": "k1"},
         "kl_loss_bound": 5.0}, "kl_loss_bound",
    ),
    "a temperature of greedy evaluation": (
        {"validation": {"generating_args": {"do_sample": False, "temperature": 0.5}}},
        "validation.generating_args.temperature",
    ),
    "two warm-ups": (
        {"actor_train.training_args": {"warmup_steps": 2, "warmup_ratio": 0.1}},
        "actor_train.training_args.warmup_ratio",
    ),
    "steps of no evaluation": ({"eval_samples": 0, "eval_steps": 5}, "eval_steps"),
    "a limit of no checkpoints": ({"save_total_limit": 2}, "save_total_limit"),
    "no checkpoints in the background": ({"async_save": True}, "async_save"),
    "groups that dynamic sampling leaves out": (
        {"dynamic_sampling": True, "drop_zero_advantage_groups": True}, "drop_zero_advantage_groups",
    ),
    "heads in the model that samples": (
        {"actor_infer.strategy_args": {"strategy_config": {"mtp_loss_scaling_factor": 0.3}}},
        "actor_infer.strategy_args.strategy_config.mtp_loss_scaling_factor",
    ),
    "FP8 in a model that is not built": (
        {"actor_infer.strategy_args": {"strategy_config": {"fp8": "e4m3"}}},
        "actor_infer.strategy_args.strategy_config.fp8",
    ),
    "the end of a constant schedule": (
        {"actor_train.training_args": {"learning_rate": 1e-4, "min_lr": 1e-5}}, "actor_train.training_args.min_lr",
    ),
    "arguments of other rewards": (
        {"reward_function": None, "rewards": {"a": {"reward_function": "exact_match"}}, "reward_args": {"after": "#"}},
        "reward_args",
    ),
    "two norms of gradients": (
        {"max_grad_norm": 0.5, "actor_train.training_args": {"max_grad_norm": 2.0}}, "max_grad_norm",
    ),
    "a temperature of evaluation with one token": (
        {"validation": {"generating_args": {"top_k": 1, "temperature": 0.5}}},
        "validation.generating_args.temperature",
    ),
    "several greedy answers": (
        {"validation": {"generating_args": {"do_sample": False, "num_return_sequences": 4}}},
        "validation.generating_args.num_return_sequences",
    ),
    "two models": ({"pretrain": "here", "actor_train.model_args": {"model_name_or_path": "there"}}, "pretrain"),
    "a divergence without weight": (
        {"add_token_level_kl": True, "reference": {}, "init_kl_coef": 0.0, "target_kl": 0.1}, "add_token_level_kl",
    ),
    "a buffer that no response reaches": (
        {f"{SAMPLING}.max_new_tokens": 8, "overlong_buffer": {"length": 8}}, "overlong_buffer",
    ),
    "two sources of characters": (
        {"tokenizer": {"vocabulary": "ab#", "vocabulary_file": "x", "eos_token": "#"}}, "tokenizer.vocabulary",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS_OF_KEYS)
def test_a_key_that_another_switches_off_is_told(name):
    changes, path = PAIRS_OF_KEYS[name]
    told = [notice for notice in config_from_dict(changed_rl(changes)).notices if notice.path == path]
    assert len(told) == 1, name


def changed_rl(changes: dict[str, Any]) -> dict[str, Any]:
    return with_changes(job_of("grpo"), changes, separator=".")


REFUSED = {
    "greedy groups": ({f"{SAMPLING}.do_sample": False}, "do_sample to true"),
    "groups of the likeliest token": ({f"{SAMPLING}.top_k": 1}, "raise top_k"),
    "a tiny top_p": ({f"{SAMPLING}.top_p": 1e-9}, "top_p: is 1e-09: greedy decoding .* raise top_p"),
    "a tiny temperature": ({f"{SAMPLING}.temperature": 1e-4}, "temperature: is 0.0001: greedy decoding"),
    "groups of one": ({"num_return_sequences_in_group": 1}, "is 1: grpo compares .* set adv_estimator to reinforce"),
    "KTO without weights": (
        {**JOBS["kto"], "loss_args": {"desirable_weight": 0.0, "undesirable_weight": 0}}, "nothing is trained",
    ),
    "seeds without a function": ({f"{DATA}.seeds": 9}, "data_args.seeds: is read by a rollout function only"),
    "seeds beside a file": (
        {f"{DATA}.seeds": 9, "rollout_function": "own:function"}, "seeds: makes the prompts, and file_name is given",
    ),
    "seeds of supervised texts": (
        {**JOBS["sft"], f"{DATA}.seeds": 9, "rollout_function": "own:function"}, "seeds: is read by a rollout function",
    ),
    "seeds of chats": (
        {"rollout_function": "own:function", DATA: {"seeds": 9, "file_name": None, "messages": "messages"}},
        "seeds: makes the prompts, and messages is given",
    ),
    "tools without chats": ({f"{DATA}.tools": "functions"}, "data_args.tools: is for chats"),
    "a rate that rises": ({"actor_train.training_args": {"min_lr": 1e-4}}, "min_lr is 0.0001, above learning_rate"),
    "a rate of the critic that rises": (
        {"adv_estimator": "gae", "critic": {"training_args": {"min_lr": 1.0}}}, "min_lr is 1, above learning_rate",
    ),
    "a million processes": ({"reward_workers": 10**6}, "reward_workers: is 1000000; it must be at most 1024"),
}  # fmt: skip


@pytest.mark.bad_input
@pytest.mark.parametrize("name", REFUSED)
def test_training_without_learning_is_refused(name):
    changes, words = REFUSED[name]
    with pytest.raises(ConfigFileError, match=words):
        config_from_dict(changed_rl(changes))


def test_greedy_decoding_of_single_responses_and_of_own_functions_is_allowed():
    for changes in (
        {"num_return_sequences_in_group": 1, "adv_estimator": "reinforce"},
        {"rollout_function": "own:function"},
    ):
        config_from_dict(changed_rl({**changes, f"{SAMPLING}.do_sample": False}))


@pytest.mark.parametrize(
    ("job", "steps"),
    [("grpo", 16), ("grpo, all on", 4), ("dpo", 4), ("sft, a stream", 3), ("ppo", 16)],
)
def test_a_warm_up_longer_than_the_job_is_told(job, steps):
    def told(warmup_steps: int, **more: Any) -> list[str]:
        change = {f"{role}.training_args.warmup_steps": warmup_steps, "actor_train.device_mapping": "0-1"}
        change |= {f"{role}.training_args.{key}": value for key, value in more.items()}
        config = config_from_dict(with_changes(job_of(job), change, separator="."))
        return [notice.text for notice in config.notices if notice.path == f"{role}.training_args.warmup_steps"]

    role = "critic" if job == "ppo" else "actor_train"
    steps = {"grpo": 4 * 16, "grpo, all on": 4 * 32, "ppo": 4 * 16}.get(job, steps)
    (text,) = told(2 * steps)
    assert (
        f"is {2 * steps}, above the number of optimizer steps, {steps}: the learning rate rises to 5e-07 alone" in text
    )
    assert told(steps) == []
    (text,) = told(2 * steps, lr_warmup_init=5e-7)
    assert "rises to 7.5e-07 alone" in text


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("first", "second", "is_refused"),
    [
        ("seed=1", "seed=2", True),
        ("seed=1", "--seed=1", True),
        ("actor_train.training_args.warmup_steps=3", "actor_train.training_args={}", True),
        ("actor_train.training_args={}", "actor_train.training_args.warmup_steps=3", False),
        ("seed=1", "max_steps=2", False),
    ],
)
def test_an_override_that_replaces_another_is_refused(tmp_path, first, second, is_refused):
    file = tmp_path / "job.yaml"
    file.write_text("seed: 4\nactor_train:\n  training_args:\n    learning_rate: 1e-5\n")
    if not is_refused:
        load_config(file, [first, second])
        return
    with pytest.raises(ConfigFileError) as caught:
        load_config(file, [first, second])
    assert f"override '{second}': replaces the override '{first}'; keep one of the two" in str(caught.value)
