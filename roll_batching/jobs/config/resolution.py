"""Values that follow from others: short forms, lengths, and what roles inherit from actor_train."""

from __future__ import annotations

from typing import Any

from roll_batching.jobs.config.async_rules import logprob_plan_of
from roll_batching.jobs.config.job_keys import JobKeys, TokenizerConfig
from roll_batching.jobs.config.objective_rules import reward_norm_of
from roll_batching.jobs.config.stream import TrainSection
from roll_batching.jobs.config.worker import ValidationConfig, WorkerConfig


def resolved(job: JobKeys) -> dict[str, Any]:
    """The fields of `job` that change once everything that follows from other keys is filled in."""
    lengths = _lengths(job)
    group = job.num_return_sequences_in_group or job.actor_infer.generating_args.num_return_sequences or 1
    longest = lengths["sequence_length"]
    train = job.actor_train
    if job.stream is not None:
        train = _streamed(train, job.stream)
    train = _own(train, longest, train.training_args.per_device_train_batch_size)
    if job.task != "grpo" and "response" not in train.data_args.model_fields_set:
        train = _update(train, "data_args", response="response")
    if job.max_grad_norm is not None and "max_grad_norm" not in train.training_args.model_fields_set:
        train = _update(train, "training_args", max_grad_norm=job.max_grad_norm)
    plan = logprob_plan_of(job) if job.task == "grpo" else "none"  # else there is no older policy
    train = train.model_copy(update={"logprob_plan": plan})
    infer = _inherit(_own(job.actor_infer, longest, job.actor_infer.infer_batch_size), train)
    tokens = infer.generating_args.max_new_tokens or lengths["response_length"]
    infer = _update(infer, "generating_args", max_new_tokens=tokens, num_return_sequences=group)
    found: dict[str, Any] = {
        **lengths,
        **{key: value for key, value in reward_norm_of(job).items() if key not in job.model_fields_set},
        "num_return_sequences_in_group": group,
        "actor_train": train,
        "actor_infer": infer,
        "validation": _validation(job, infer),
    }
    reference = WorkerConfig() if job.reference is None and job.task == "dpo" else job.reference
    if reference is not None:
        found["reference"] = _inherit(_own(reference, longest, reference.infer_batch_size), train)
    if job.stream is not None and job.stream.max_num_steps is not None:
        found["max_steps"] = job.stream.max_num_steps
    if job.task != "grpo" and "loss_function" not in job.model_fields_set:
        found["loss_function"] = job.task
    if train.model_args.model_name_or_path is not None:
        found["tokenizer"] = _of_the_model(job.tokenizer, train.model_args.model_name_or_path)
    return found


def _validation(job: JobKeys, infer: WorkerConfig) -> ValidationConfig:
    """How held-out prompts are answered: as rollouts are, once each, but for what is given."""
    own = job.validation.generating_args
    given = {name: getattr(own, name) for name in own.model_fields_set if getattr(own, name) is not None}
    args = infer.generating_args.model_copy(update={"num_return_sequences": 1, **given})
    return ValidationConfig(generating_args=args)


def _streamed(role: WorkerConfig, stream: TrainSection) -> WorkerConfig:
    """`role` as `stream` says that training is batched."""
    role = role.model_copy(update=stream.batching_keys)
    cap = stream.train_policy.load_balanced_max_tokens_for_batch
    caps = {"max_packed_sequence_length_train": cap, "max_packed_sequence_length_forward": cap}
    return _update(role, "sequence_packing_args", **caps) if stream.sequence_packing else role


def _of_the_model(tokenizer: TokenizerConfig, model: str) -> TokenizerConfig:
    """The tokenizer of the model directory, where none is described."""
    described = "type" in tokenizer.model_fields_set or tokenizer.vocabulary or tokenizer.vocabulary_file
    kind = tokenizer.type if described else "hf"
    name = tokenizer.name_or_path or (model if kind == "hf" else None)
    return tokenizer.model_copy(update={"type": kind, "name_or_path": name})


def _lengths(job: JobKeys) -> dict[str, int | None]:
    response, whole = job.response_length, job.sequence_length
    if job.task != "grpo" and whole is not None:
        # One key says how long texts are; what is left of a run's model asks for prompts and answers (`generate`).
        asked = job.prompt_length if "prompt_length" in job.model_fields_set else whole
        return {"prompt_length": asked, "response_length": response or whole, "sequence_length": whole}
    if response is None and whole is not None:
        response = max(1, whole - job.prompt_length)
    if response is None:
        response = job.actor_infer.generating_args.max_new_tokens
    if whole is None and response is not None:
        whole = job.prompt_length + response
    return {"response_length": response, "sequence_length": whole}


def _own(role: WorkerConfig, sequence_length: int | None, rows: int) -> WorkerConfig:
    """What a role takes from the job's top level; `rows` sequences are one of its micro-batches in padded mode."""
    flags = ("use_dynamic_batching_in_train", "use_dynamic_batching_in_infer")
    if role.use_dynamic_batching is not None:
        short = {key: role.use_dynamic_batching for key in flags if key not in role.model_fields_set}
        role = role.model_copy(update=short)
    packing = role.sequence_packing_args
    given = packing.max_packed_sequence_length_train or packing.max_packed_sequence_length_forward
    if role.use_sequence_packing and given is None and sequence_length is not None:
        role = _update(role, "sequence_packing_args", max_packed_sequence_length_train=rows * sequence_length)
    if role.padded_length is None:
        return role.model_copy(update={"padded_length": sequence_length})
    return role


def _inherit(role: WorkerConfig, train: WorkerConfig) -> WorkerConfig:
    """What a role takes from actor_train: the model, and every layout key that it does not set itself."""
    for key in ("model_name_or_path", "family", "architecture", "dtype"):
        if key not in role.model_args.model_fields_set:
            role = _update(role, "model_args", **{key: getattr(train.model_args, key)})
    layout = role.strategy_args.strategy_config
    shared = train.strategy_args.strategy_config
    missing = {name: getattr(shared, name) for name in type(layout).model_fields if name not in layout.model_fields_set}
    if layout.pipeline_model_parallel_size != shared.pipeline_model_parallel_size:
        if "pipeline_model_parallel_size" in layout.model_fields_set:  # chunks are of a pipeline, and this is another
            missing = {name: value for name, value in missing.items() if name not in _OF_THE_PIPELINE}
    strategy = role.strategy_args.model_copy(update={"strategy_config": layout.model_copy(update=missing)})
    devices = train.device_mapping if role.device_mapping is None else role.device_mapping
    return role.model_copy(update={"strategy_args": strategy, "device_mapping": devices})


_OF_THE_PIPELINE = ("virtual_pipeline_model_parallel_size", "microbatch_group_size_per_vp_stage")


def _update(role: WorkerConfig, section: str, **values: Any) -> WorkerConfig:
    return role.model_copy(update={section: getattr(role, section).model_copy(update=values)})
