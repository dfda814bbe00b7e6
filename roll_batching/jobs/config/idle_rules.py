"""Keys that other keys of the job switch off, and settings with which a job would train without learning."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from roll_batching.jobs.config.advantages import ADVANTAGE_ESTIMATORS
from roll_batching.jobs.config.diagnostics import KeyPath, Notice, Problem, no_effect
from roll_batching.jobs.config.job_keys import JobKeys
from roll_batching.jobs.config.key_paths import field_at
from roll_batching.jobs.config.layout_rules import PARALLEL_KEYS, builds_sampling_model
from roll_batching.jobs.config.losses import LOSSES
from roll_batching.jobs.config.rewards import RewardKeys
from roll_batching.jobs.config.rl_rules import uses_critic
from roll_batching.jobs.config.supervised import supervised
from roll_batching.jobs.config.worker import GeneratingArgs
from roll_batching.settings.megatron_config import MegatronConfig
from roll_batching.settings.training import TrainingArgs

_LAYOUT = ("strategy_args", "strategy_config")
_SHAPES = ("temperature", "top_p", "top_k")
_OBJECTIVES = {
    "mixed_kl_weight": ("mixed_kl",),
    "skew_lambda": ("skewed_forward_kl", "skewed_reverse_kl"),
    "adaptive_kl_alpha": ("adaptive_kl",),
}
"""Keys of one or two values of kd_objective."""
_INFERENCE: tuple[KeyPath, ...] = (
    ("sequence_packing_args", "max_packed_sequence_length_forward"),
    ("sequence_packing_args", "min_num_micro_batches_forward"),
    ("use_dynamic_batching_in_infer",),
    ("max_tokens_per_microbatch_in_infer",),
    ("sequence_length_round_in_infer",),
    ("infer_batch_size",),
)
"""Keys of a role's passes without gradient."""

_GREEDY = 1e-4
"""Largest top_p and temperature at which the likeliest token is taken in practice."""
NOT_EVALUATED = "nothing is evaluated"
"""End of the notices about keys of an evaluation."""


def group_problems(job: JobKeys) -> Iterator[Problem]:
    """Groups that cannot be compared: given as one response, or of greedy decoding, whose responses are the same."""
    args, size = job.actor_infer.generating_args, job.group_size
    if supervised(job) or not job.max_steps:
        return
    is_given = "num_return_sequences_in_group" in job.model_fields_set  # resolved settings have it, too
    if is_given and (job.has_reward or job.rollout_function is not None):
        yield from single_responses(job)
    greedy = greedy_key(args)
    if greedy is None or size < 2 or job.rollout_function is not None:
        return
    key, value = greedy
    text = f"is {value}: greedy decoding makes the {size} responses of a prompt equal, and nothing is learned from"
    cure = {"do_sample": "set do_sample to true", "top_k": "raise top_k, or set it to 0"}.get(key, f"raise {key}")
    text += f" comparing them; {cure}, or num_return_sequences_in_group to 1"
    yield Problem(("actor_infer", "generating_args", key), text)


def greedy_key(args: GeneratingArgs) -> tuple[str, str] | None:
    """The key of `args` that makes decoding greedy, and its value; None where tokens are sampled."""
    if not args.do_sample:
        return "do_sample", "false"
    if args.top_k == 1:
        return "top_k", "1"
    tiny = [key for key in ("temperature", "top_p") if getattr(args, key) <= _GREEDY]
    return (tiny[0], f"{getattr(args, tiny[0]):g}") if tiny else None


def single_responses(job: JobKeys) -> Iterator[Problem]:
    """Groups of one response, where the advantage estimator compares responses."""
    estimator = ADVANTAGE_ESTIMATORS.get(job.adv_estimator)
    if job.task == "grpo" and estimator is not None and estimator.compares and job.group_size < 2:
        text = f"is {job.group_size}: {estimator.name} compares the responses of a prompt and needs at least 2; raise"
        yield Problem(("num_return_sequences_in_group",), f"{text} it, or set adv_estimator to reinforce")


def idle_notices(job: JobKeys, given: Mapping[str, Any]) -> Iterator[Notice]:
    """Notices on `given` keys, with other values than their defaults, that other keys switch off."""
    for path, reason in (*_of_the_job(job), *_of_sampling(job), *_of_roles(job, given)):
        value = _value_at(given, path)
        field = field_at(path)
        if value is not None and field is not None and value != field.default:
            yield no_effect(path, reason)
    yield from _kl_bound(job, given)
    yield from _equal_answers(job, given)
    yield from _short_warmups(job)


def _value_at(given: Any, path: KeyPath) -> Any:
    for part in path:
        given = given.get(part) if isinstance(given, dict) else None
    return given


def _of_the_job(job: JobKeys) -> Iterator[tuple[KeyPath, str]]:
    """Path and reason of keys of the job that it does not read."""
    data = ("actor_train", "data_args")
    if not job.save_steps:
        for key in ("save_total_limit", "async_save"):
            yield (key,), "save_steps is 0: no checkpoint is written"
    if (reason := _without_evaluation(job)) is not None:
        keys: list[KeyPath] = [(*data, "eval_file_name"), ("eval_steps",)]
        keys += [("eval_samples",)] if job.eval_samples else []
        keys += [("validation", "generating_args", key) for key in GeneratingArgs.model_fields]
        keys += [("actor_train", *key) for key in _INFERENCE] if supervised(job) else []
        for path in keys:
            yield path, f"{reason}: {NOT_EVALUATED}"
    if job.dynamic_sampling:
        reason = "dynamic_sampling leaves no group with equal rewards"
        yield ("drop_zero_advantage_groups",), reason
    if not supervised(job):
        if job.rewards:
            yield ("reward_args",), "each of `rewards` has its own"
        elif not job.has_reward:
            for key in RewardKeys.model_fields:
                yield (key,), "no reward_function scores responses"
        buffer, longest = job.overlong_buffer, job.actor_infer.generating_args.max_new_tokens
        if buffer is not None and longest is not None and job.rollout_function is None:
            begin = (buffer.response_length or job.response_length or longest) - buffer.length
            if longest <= begin:
                reason = f"a response has at most {longest} tokens, and the penalty begins after {begin}"
                yield ("overlong_buffer",), reason
        if not job.rewards:
            yield (*data, "tag"), "there are no `rewards`, whose prompts tags select"
        if job.actor_train.data_args.messages is not None:
            yield (*data, "prompt"), "messages is given"
    if job.actor_train.model_args.model_name_or_path not in (None, job.pretrain):
        yield ("pretrain",), "actor_train.model_args.model_name_or_path is given"
    tokenizer = job.tokenizer
    if tokenizer.type == "char":
        yield ("tokenizer", "name_or_path"), "tokenizer.type is char"
        if tokenizer.vocabulary_file is not None:
            yield ("tokenizer", "vocabulary"), "vocabulary_file is given"
    else:
        for key in ("vocabulary", "vocabulary_file"):
            yield ("tokenizer", key), "tokenizer.type is hf"
    for key, objectives in _OBJECTIVES.items():
        if job.kd_objective not in objectives:
            yield (key,), f"kd_objective is {job.kd_objective}"


def _without_evaluation(job: JobKeys) -> str | None:
    """Why nothing held out is evaluated; None where it is."""
    if not job.eval_samples:
        return "eval_samples is 0"
    if job.actor_train.data_args.eval_file_name is None:
        return "actor_train.data_args.eval_file_name is not given"
    if supervised(job) or job.has_reward or job.rollout_function is not None:
        return None
    return "no reward_function scores answers"


def _of_sampling(job: JobKeys) -> Iterator[tuple[KeyPath, str]]:
    """Keys of greedy decoding; the sampling temperature is also that of the loss's log-probs."""
    for role in ("validation", "actor_infer"):
        greedy = greedy_key(getattr(job, role).generating_args)
        if greedy is None:
            continue
        key, value = greedy
        is_read = role == "actor_infer" and job.task == "grpo" and job.actor_train.logprob_temperature is None
        for other in _SHAPES[1:] if is_read else _SHAPES:
            if other != key:
                yield (role, "generating_args", other), f"{key} is {value}: decoding is greedy"


def _of_roles(job: JobKeys, given: Mapping[str, Any]) -> Iterator[tuple[KeyPath, str]]:
    """Keys of optimizers and layouts."""
    trained: list[tuple[KeyPath, TrainingArgs]] = [
        ((name, "training_args"), role.training_args)
        for name, role in job.roles.items()
        if name in ("actor_train", "critic")
    ]
    if job.warmup is not None:
        trained.append((("warmup", "training_args"), job.warmup.training_args))
        if job.warmup.messages is not None:
            yield from ((("warmup", key), "warmup.messages is given") for key in ("prompt", "response"))
    for path, args in trained:
        if args.warmup_steps:
            yield (*path, "warmup_ratio"), f"warmup_steps is {args.warmup_steps}"
        if args.lr_scheduler_type.startswith("constant"):
            yield (*path, "min_lr"), f"lr_scheduler_type is {args.lr_scheduler_type}"
            if path[0] == "actor_train" and not args.warmup_ratio:
                yield (*path, "max_steps"), "lr_scheduler_type is constant, and warmup_ratio 0: no schedule ends"
    given_norms = [_value_at(given, (*path, "max_grad_norm")) for path, _ in trained if path[0] != "warmup"]
    if all(norm not in (None, job.max_grad_norm) for norm in given_norms):
        yield ("max_grad_norm",), "training_args.max_grad_norm is given"
    for name, role in job.roles.items():
        layout, path = role.strategy_args.strategy_config, (name, *_LAYOUT)
        if layout.pipeline_model_parallel_size == 1:
            for key in ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"):
                yield (*path, key), "pipeline_model_parallel_size is 1"
        if layout.vpp_size == 1:
            yield (*path, "microbatch_group_size_per_vp_stage"), "virtual_pipeline_model_parallel_size is 1"
        if not layout.mtp_loss_scaling_factor:
            yield (*path, "mtp_detach_heads"), "mtp_loss_scaling_factor is 0: the heads are not trained"
    yield from _of_rollouts(job)


def _of_rollouts(job: JobKeys) -> Iterator[tuple[KeyPath, str]]:
    """Keys of actor_infer's layout where actor_train's model samples."""
    sampling, training = (role.strategy_args for role in (job.actor_infer, job.actor_train))
    if supervised(job) or builds_sampling_model(job) or not sampling.runs_on_megatron:
        return
    for key in MegatronConfig.model_fields:
        own, shared = (getattr(args.strategy_config, key) for args in (sampling, training))
        if key not in PARALLEL_KEYS and own != shared:
            yield ("actor_infer", *_LAYOUT, key), "rollouts are sampled by actor_train's model, with its settings"


def _equal_answers(job: JobKeys, given: Mapping[str, Any]) -> Iterator[Notice]:
    """Several greedy answers to a held-out prompt: they cost time and are the same."""
    path = ("validation", "generating_args", "num_return_sequences")
    number, args = _value_at(given, path), job.validation.generating_args
    if isinstance(number, int) and number > 1 and greedy_key(args) is not None and _without_evaluation(job) is None:
        yield Notice(path, f"decoding is greedy: the {number} answers to a prompt are equal, and 1 measures the same")


def _kl_bound(job: JobKeys, given: Mapping[str, Any]) -> Iterator[Notice]:
    """A bound of k3 in a loss without it."""
    loss = LOSSES.get(job.loss_function)
    if loss is None or "kl_bound" not in loss.keys or "kl_loss_bound" not in given:
        return
    estimator = job.loss_args.get("kl_estimator", "k3")
    if job.kl_loss_bound != JobKeys.model_fields["kl_loss_bound"].default and not (job.kl_coef and estimator == "k3"):
        cause = f"kl_estimator is {estimator}" if job.kl_coef else "use_kl_loss is false or kl_loss_coef is 0"
        yield Notice(("kl_loss_bound",), f"bounds the metric approx_kl alone: {cause}")


def _short_warmups(job: JobKeys) -> Iterator[Notice]:
    """Warm-ups of the learning rate that are longer than their phase."""
    phases: list[tuple[Sequence[str], TrainingArgs, int | None]] = []
    dp_size = 1  # of all sizes the one with the most optimizer steps
    size = job.actor_train.strategy_args.strategy_config.model_size
    if job.world_size is not None and job.world_size % size == 0:
        dp_size = job.world_size // size
    phases.append((("actor_train",), job.actor_train.training_args, job.optimizer_steps(dp_size)))
    if uses_critic(job) and job.critic is not None:
        args = job.critic.training_args
        size = args.per_device_train_batch_size * args.gradient_accumulation_steps * dp_size
        phases.append(
            (("critic",), args, job.max_steps * math.ceil(job.samples_per_rollout / size) * job.critic_epochs)
        )
    if job.warmup is not None:
        steps = job.warmup.training_args.max_steps if job.warmup.num_train_epochs is None else None
        phases.append((("warmup",), job.warmup.training_args, steps))
    for path, args, steps in phases:
        text = args.unfinished_warmup(steps) if steps else None
        if text is not None:
            yield Notice((*path, "training_args", "warmup_steps"), text)
