"""Derived values: short forms, lengths, and keys that roles inherit from actor_train."""

from __future__ import annotations

from typing import Any

from roll_batching.jobs.config.engine_rules import logprob_plan_of
from roll_batching.jobs.config.job_keys import SUPERVISED_TASKS, JobKeys
from roll_batching.jobs.config.job_sections import TokenizerConfig, TrainSection
from roll_batching.jobs.config.layout_rules import ONE_WHEN_SAMPLING, fixed_size
from roll_batching.jobs.config.model_rules import ADAPTER_KEYS
from roll_batching.jobs.config.worker import ValidationConfig, WorkerConfig
from roll_batching.settings.megatron_config import SPLIT_KEYS


def resolve(job: JobKeys) -> dict[str, Any]:
    """Returns the fields of `job` whose values are derived from other keys."""
    lengths = _lengths(job)
    group = job.num_return_sequences_in_group or job.actor_infer.generating_args.num_return_sequences or 1
    sequence_length = lengths["sequence_length"]
    train = job.actor_train
    if job.stream is not None:
        train = _batched_by_stream(train, job.stream)
    if job.token_budget > 0:
        train = _packed_up_to(train, job.token_budget)
    train = _derive_batching(train, sequence_length, train.training_args.per_device_train_batch_size)
    supervised = job.task in SUPERVISED_TASKS
    if supervised and "response" not in train.data_args.model_fields_set:
        train = _update(train, "data_args", response="completion" if job.task == "kto" else "response")
    if job.max_grad_norm is not None and "max_grad_norm" not in train.training_args.model_fields_set:
        train = _update(train, "training_args", max_grad_norm=job.max_grad_norm)
    if _loss_of(job) == "distill" and train.sequence_packing_args.share_prefixes == "auto":
        train = _update(train, "sequence_packing_args", share_prefixes=False)  # each sample has its own candidates
    plan = logprob_plan_of(job) if job.task == "grpo" else "none"  # the other tasks have no old policy
    train = train.model_copy(update={"logprob_plan": plan})
    infer = _derive_batching(_able_to_sample(job), sequence_length, job.actor_infer.infer_batch_size)
    infer = _with_adapters(_inherit(infer, train), train)
    tokens = infer.generating_args.max_new_tokens or lengths["response_length"]
    infer = _update(infer, "generating_args", max_new_tokens=tokens, num_return_sequences=group)
    fields: dict[str, Any] = {
        **lengths,
        **{key: value for key, value in job.norms_of_reward_norm.items() if key not in job.model_fields_set},
        "num_return_sequences_in_group": group,
        "actor_train": train,
        "actor_infer": infer,
        "validation": _validation(job, infer),
    }
    reference = WorkerConfig() if job.reference is None and job.task in ("dpo", "kto") else job.reference
    if reference is not None:
        reference = _inherit(_derive_batching(reference, sequence_length, reference.infer_batch_size), train)
        fields["reference"] = _with_adapters(reference, train)
    if job.critic is not None:
        fields["critic"] = _critic(job, train, sequence_length)
    if job.teacher is not None:
        fields["teacher"] = _teacher(job, train, sequence_length)
    if job.stream is not None and job.stream.max_num_steps is not None:
        fields["max_steps"] = job.stream.max_num_steps
    if job.task == "distill":
        fields["adv_estimator"] = "reinforce"  # rewards are measured alone, without groups
    fields["loss_function"] = _loss_of(job)
    if train.model_args.model_name_or_path is not None:
        fields["tokenizer"] = _default_tokenizer(job.tokenizer, train.model_args.model_name_or_path)
    return fields


def _able_to_sample(job: JobKeys) -> WorkerConfig:
    """actor_infer with 1 for the sizes of actor_train that no model samples in, where actor_infer gives none.

    Not where actor_train's own layout counts: in tasks without rollouts, and beside the sampler of one process.
    """
    role, shared = job.actor_infer, job.actor_train.strategy_args.strategy_config
    on_one_process = job.asynchronous and job.own_devices("actor_infer") is None
    if job.task in SUPERVISED_TASKS or on_one_process or not role.strategy_args.runs_on_megatron:
        return role
    layout = role.strategy_args.strategy_config
    keys = [key for key in ONE_WHEN_SAMPLING if key not in layout.model_fields_set and fixed_size(shared, key) > 1]
    layout = layout.model_copy(update=dict.fromkeys(keys, 1))
    return role.model_copy(update={"strategy_args": role.strategy_args.model_copy(update={"strategy_config": layout})})


def _loss_of(job: JobKeys) -> str:
    """The loss that the job names; else, under other tasks than grpo, the loss with the task's name."""
    return job.loss_function if job.task == "grpo" or "loss_function" in job.model_fields_set else job.task


def _critic(job: JobKeys, train: WorkerConfig, sequence_length: int | None) -> WorkerConfig:
    """Derives the critic: with a value head, and actor_train's model and layout where the critic gives none."""
    assert job.critic is not None
    rows = job.critic.training_args.per_device_train_batch_size
    critic = _inherit(_derive_batching(job.critic, sequence_length, rows), train)
    if job.max_grad_norm is not None and "max_grad_norm" not in critic.training_args.model_fields_set:
        critic = _update(critic, "training_args", max_grad_norm=job.max_grad_norm)
    if "value_head" in critic.model_args.model_fields_set:  # false is reported by critic_rules
        return critic
    return _update(critic, "model_args", value_head=True)


def _teacher(job: JobKeys, train: WorkerConfig, sequence_length: int | None) -> WorkerConfig:
    """Derives the teacher: with its own model, and actor_train's layout and devices where it gives none."""
    assert job.teacher is not None
    teacher = _derive_batching(job.teacher, sequence_length, job.teacher.infer_batch_size)
    # `_inherit` would take the student's model where the teacher's section leaves one of these out.
    model = {key: getattr(teacher.model_args, key) for key in _MODEL}
    if "dtype" not in teacher.model_args.model_fields_set:
        teacher = _update(teacher, "model_args", dtype=train.model_args.dtype)
    return _update(_inherit(teacher, train), "model_args", **model)


def _validation(job: JobKeys, infer: WorkerConfig) -> ValidationConfig:
    """Derives how the evaluation samples: as rollouts do, once per prompt, except for the keys of `validation`."""
    evaluation = job.validation.generating_args
    given = {name: value for name in evaluation.model_fields_set if (value := getattr(evaluation, name)) is not None}
    args = infer.generating_args.model_copy(update={"num_return_sequences": 1, **given})
    return ValidationConfig(generating_args=args)


def _batched_by_stream(role: WorkerConfig, stream: TrainSection) -> WorkerConfig:
    """`role` with the batching keys that `stream` replaces."""
    role = role.model_copy(update=stream.batching_keys)
    cap = stream.train_policy.load_balanced_max_tokens_for_batch
    caps = {"max_packed_sequence_length_train": cap, "max_packed_sequence_length_forward": cap}
    return _update(role, "sequence_packing_args", **caps) if stream.sequence_packing else role


def _packed_up_to(train: WorkerConfig, budget: int) -> WorkerConfig:
    """`train` with TRL's `token_budget` as the cap of its packs; keys that `train` gives stay, for `task_rules`."""
    if "use_sequence_packing" not in train.model_fields_set:
        train = train.model_copy(update={"use_sequence_packing": True})
    if train.sequence_packing_args.max_packed_sequence_length_train is None:
        train = _update(train, "sequence_packing_args", max_packed_sequence_length_train=budget)
    if "oversize" not in train.planning_args.model_fields_set:
        train = _update(train, "planning_args", oversize="alone")
    return train


def _default_tokenizer(tokenizer: TokenizerConfig, model: str) -> TokenizerConfig:
    """The tokenizer that the file gives, else that of the model directory `model`."""
    is_given = "type" in tokenizer.model_fields_set or tokenizer.vocabulary or tokenizer.vocabulary_file
    kind = tokenizer.type if is_given else "hf"
    name = tokenizer.name_or_path or (model if kind == "hf" else None)
    return tokenizer.model_copy(update={"type": kind, "name_or_path": name})


def _lengths(job: JobKeys) -> dict[str, int | None]:
    """Limits of prompt, response and sequence in tokens, each derived from the others."""
    response, longest = job.response_length, job.sequence_length
    if job.task in SUPERVISED_TASKS and longest is not None:
        # `generate` samples from the trained model, and needs limits of prompt and response.
        prompt = job.prompt_length if "prompt_length" in job.model_fields_set else longest
        return {"prompt_length": prompt, "response_length": response or longest, "sequence_length": longest}
    if response is None and longest is not None:
        response = max(1, longest - job.prompt_length)
    if response is None:
        response = job.actor_infer.generating_args.max_new_tokens
    if longest is None and response is not None:
        longest = job.prompt_length + response
    return {"response_length": response, "sequence_length": longest}


def _derive_batching(role: WorkerConfig, sequence_length: int | None, rows: int) -> WorkerConfig:
    """`role` with derived flags, cap of packs and padded length; a padded micro-batch has `rows` sequences."""
    flags = ("use_dynamic_batching_in_train", "use_dynamic_batching_in_infer")
    if role.use_dynamic_batching is not None:
        derived = {key: role.use_dynamic_batching for key in flags if key not in role.model_fields_set}
        role = role.model_copy(update=derived)
    packing = role.sequence_packing_args
    cap = packing.max_packed_sequence_length_train or packing.max_packed_sequence_length_forward
    if role.use_sequence_packing and cap is None and sequence_length is not None:
        role = _update(role, "sequence_packing_args", max_packed_sequence_length_train=rows * sequence_length)
    if role.padded_length is None:
        return role.model_copy(update={"padded_length": sequence_length})
    return role


def _inherit(role: WorkerConfig, train: WorkerConfig) -> WorkerConfig:
    """`role` with actor_train's time limit, and its model and layout keys where `role` gives none."""
    for key in (*_MODEL, "dtype"):
        if key not in role.model_args.model_fields_set:
            role = _update(role, "model_args", **{key: getattr(train.model_args, key)})
    layout = role.strategy_args.strategy_config
    shared = train.strategy_args.strategy_config
    given = layout.model_fields_set
    missing = {name: getattr(shared, name) for name in type(layout).model_fields if name not in given}
    # The keys of a split belong together, and to one number of stages: a role takes all of actor_train's, or none.
    chunks = {"virtual_pipeline_model_parallel_size"} if layout.vpp_size != shared.vpp_size else set()
    if given & {*SPLIT_KEYS, *chunks}:
        missing = {name: value for name, value in missing.items() if name not in SPLIT_KEYS}
    if layout.pipeline_model_parallel_size != shared.pipeline_model_parallel_size:
        if "pipeline_model_parallel_size" in given:  # VPP belongs to actor_train's pipeline
            missing = {name: value for name, value in missing.items() if name not in _PIPELINE_KEYS}
    strategy = role.strategy_args.model_copy(update={"strategy_config": layout.model_copy(update=missing)})
    devices = train.device_mapping if role.device_mapping is None else role.device_mapping
    changes = {"strategy_args": strategy, "device_mapping": devices, "backend_timeout": train.backend_timeout}
    return role.model_copy(update=changes)


def _with_adapters(role: WorkerConfig, train: WorkerConfig) -> WorkerConfig:
    """`role` with the keys of actor_train's adapters that it does not give itself."""
    keys = (key for key in ADAPTER_KEYS if key not in role.model_args.model_fields_set)
    return _update(role, "model_args", **{key: getattr(train.model_args, key) for key in keys})


_MODEL = ("model_name_or_path", "family", "vision_encoder", "architecture")
_PIPELINE_KEYS = ("virtual_pipeline_model_parallel_size", "microbatch_group_size_per_vp_stage", *SPLIT_KEYS)


def _update(role: WorkerConfig, section: str, **values: Any) -> WorkerConfig:
    return role.model_copy(update={section: getattr(role, section).model_copy(update=values)})
