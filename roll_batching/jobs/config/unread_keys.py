"""Keys that nothing reads because of other settings of the job, where the `Switch` of the field cannot tell."""

from __future__ import annotations

from collections.abc import Iterator

from roll_batching.jobs.config.advantages import ADVANTAGE_ESTIMATORS, ADVANTAGE_KEYS
from roll_batching.jobs.config.diagnostics import KeyPath
from roll_batching.jobs.config.engine_rules import ignored_option, starts_servers, uses_engine
from roll_batching.jobs.config.job_keys import NOT_EVALUATED, JobKeys
from roll_batching.jobs.config.layout_rules import PARALLEL_KEYS, builds_sampling_model, sampling_role
from roll_batching.jobs.config.losses import LOSSES
from roll_batching.jobs.config.objective_rules import KEYS_OF_FIELDS
from roll_batching.jobs.config.worker import WorkerConfig
from roll_batching.settings.fields import TRAINED
from roll_batching.settings.megatron_config import ENGINE_STRATEGIES, MegatronConfig
from roll_batching.settings.training import LOSS_SCALE_KEYS

Unread = Iterator[tuple[KeyPath, str]]
"""Paths of keys, given or not, and why nothing reads them."""

_LAYOUT = ("strategy_args", "strategy_config")
_INFERENCE: tuple[KeyPath, ...] = (
    ("sequence_packing_args", "max_packed_sequence_length_forward"),
    ("sequence_packing_args", "min_num_micro_batches_forward"),
    ("use_dynamic_batching_in_infer",),
    ("max_tokens_per_microbatch_in_infer",),
    ("sequence_length_round_in_infer",),
    ("infer_batch_size",),
)
"""Keys of a role's passes without gradient."""
_STREAMED = (
    *("use_sequence_packing", "use_dynamic_batching", "use_dynamic_batching_in_train", "use_dynamic_batching_in_infer"),
    *("max_tokens_per_microbatch_in_train", "max_tokens_per_microbatch_in_infer", "padded_length", "infer_batch_size"),
)
"""Keys of actor_train that batching over a stream replaces."""
_HF_KEYS = ("weights_folder", "gap_warning")
"""Keys of engine_args that `hf_infer`, an engine in the job's own processes, reads."""
_KL_OFF = "use_kl_loss is false or kl_loss_coef is 0"


def unread_keys(job: JobKeys) -> Unread:
    """Keys that the job does not read because of its other settings; of several reasons for a key the first counts."""
    yield from _of_objective(job)
    yield from _of_sampling(job)
    for name, role in job.roles.items():
        yield from _of_routers((name, *_LAYOUT), role)
    yield from _of_loss_scales(job)
    args = job.actor_train.training_args
    if args.is_constant and not args.warmup_ratio:
        text = "lr_scheduler_type is constant, and warmup_ratio 0: no schedule ends"
        yield ("actor_train", "training_args", "max_steps"), text
    if job.is_supervised and job.without_evaluation is not None:
        yield from ((("actor_train", *key), f"{job.without_evaluation}: {NOT_EVALUATED}") for key in _INFERENCE)
    if job.stream is not None:
        yield ("num_train_epochs",), "train.max_num_steps is the job's length"
        text = "an optimizer step is load_balanced_batches_per_optimizer_step micro-batches per rank"
        for key in ("per_device_train_batch_size", "gradient_accumulation_steps"):
            yield ("actor_train", "training_args", key), text


def replaced_keys(job: JobKeys) -> Unread:
    """Keys whose values other keys replace; a notice is due where a file gives another value than the job has."""
    if job.stream is not None:
        yield ("max_steps",), "train.max_num_steps is the job's length"
        yield from ((("actor_train", key), "train.train_policy replaces it") for key in _STREAMED)
    if "num_return_sequences_in_group" in job.model_fields_set:
        reason = f"num_return_sequences_in_group = {job.group_size} is used"
        yield ("actor_infer", "generating_args", "num_return_sequences"), reason


def _of_objective(job: JobKeys) -> Unread:
    """Keys and settings of the loss and the advantages that the job's loss and estimator do not read."""
    loss = LOSSES.get(job.loss_function)
    read = {key for field in (loss.keys if loss else ()) for key in KEYS_OF_FIELDS[field]}
    for key in dict.fromkeys(key for keys in KEYS_OF_FIELDS.values() for key in keys):
        if key not in read:
            yield (key,), f"{job.loss_function} does not read it; its own settings go into loss_args"
    estimator = ADVANTAGE_ESTIMATORS.get(job.adv_estimator)
    for key in ADVANTAGE_KEYS if job.task == "grpo" else ():
        if estimator is None:
            yield (key,), f"{job.adv_estimator} alone computes the advantages"
        elif key not in {*estimator.keys, *estimator.implied}:
            yield (key,), f"the advantages of {job.adv_estimator} do not depend on it"
    if "kl_loss_coef" not in read:
        return
    if not job.kl_coef:
        yield from ((("loss_args", name), _KL_OFF) for name in ("kl_estimator", "kl_gradient"))
    if job.loss_args.get("engine_ratio_cap") is None:
        reason = "engine_ratio_cap is not given"
        yield from ((("loss_args", name), reason) for name in ("engine_correction", "engine_ratio_min"))
    elif job.actor_train.logprob_plan == "rollout":
        reason = "under logprob_plan: rollout the old log-probs are the engine's own: no other numbers to correct"
        yield ("loss_args", "engine_ratio_cap"), reason


def _of_sampling(job: JobKeys) -> Unread:
    """Keys of sampling that greedy decoding, short responses, or the layout of the sampling model leave unread."""
    for role in ("validation", "actor_infer"):
        args = getattr(job, role).generating_args
        # The sampling temperature is also that of the loss's log-probs.
        is_read = role == "actor_infer" and job.task == "grpo" and job.actor_train.logprob_temperature is None
        if args.greedy not in (None, "temperature") and not is_read:
            yield (role, "generating_args", "temperature"), f"{args.greedy} is {args.greedy_value}: decoding is greedy"
    buffer, longest = job.overlong_buffer, job.actor_infer.generating_args.max_new_tokens
    if buffer is not None and longest is not None and job.rollout_function is None:
        begin = (buffer.response_length or job.response_length or longest) - buffer.length
        if longest <= begin:
            yield ("overlong_buffer",), f"a response has at most {longest} tokens, and the penalty begins after {begin}"
    stages = sampling_role(job).strategy_args.strategy_config.pipeline_model_parallel_size
    if stages > 1:
        reason = f"with {stages} pipeline stages generation keeps no cache"
        yield ("actor_infer", "generating_args", "max_tokens_in_cache"), reason
    sampling, training = (role.strategy_args for role in (job.actor_infer, job.actor_train))
    if job.is_supervised or builds_sampling_model(job) or not sampling.runs_on_megatron:
        return
    for key in MegatronConfig.model_fields:
        own, shared = (getattr(args.strategy_config, key) for args in (sampling, training))
        if key not in PARALLEL_KEYS and own != shared:
            yield ("actor_infer", *_LAYOUT, key), "rollouts are sampled by actor_train's model, with its settings"


def _of_routers(path: KeyPath, role: WorkerConfig) -> Unread:
    """Router keys without effect, in a model without a mixture of experts or without expert biases."""
    model, bias_rate = role.model_args.architecture, "moe_router_bias_update_rate"
    if model is not None and model.moe is None:
        for key in ("moe_router_dtype", "freeze_moe_router", bias_rate):
            yield (*path, key), "the model has no mixture of experts"
    elif model is not None and model.moe is not None and not model.moe.router_expert_bias:
        yield (*path, bias_rate), "the model's routers have no expert biases"


def _of_loss_scales(job: JobKeys) -> Unread:
    """Keys of the loss scale of models in another precision than fp16."""
    roles = [(name, role.model_args.dtype) for name, role in job.roles.items() if name in TRAINED.names]
    for name, dtype in [*roles, ("warmup", job.actor_train.model_args.dtype)]:
        if dtype != "fp16":
            for key in LOSS_SCALE_KEYS:
                yield (name, "training_args", key), f"model_args.dtype is {dtype}: only fp16 has a loss scale"


def unread_by_engine(job: JobKeys, role: WorkerConfig, path: KeyPath) -> str | None:
    """Why a role served by an engine does not read the key at `path` (within the role), or None if it does."""
    engine, used = role.strategy_args.strategy_name, uses_engine(job)
    if engine not in ENGINE_STRATEGIES:
        return None
    if path[:2] == _LAYOUT:
        if not starts_servers(job):
            return f"a setting of {engine}, which is not started here"
        return ignored_option(str(path[-1]), role.strategy_args.engine_options.get(str(path[-1])))
    if path[:1] == ("engine_args",):
        if path[1:] in (("command",), ("start_timeout",)) and used and not starts_servers(job):
            return "the job starts no server"
        if not used or (engine == "hf_infer" and path[-1] not in _HF_KEYS):
            return f"{engine} sends no requests to servers"
        if path[1:] == ("weights_folder",) and role.engine_args.update_weights_from == "distributed":
            return "weights go to the engine without a file (update_weights_from: distributed)"
    if path == ("generating_args", "max_tokens_in_cache") and used:
        return "it limits the Megatron model's cache; the engine has its own limit"
    if path == ("device_mapping",) and role.device_mapping != job.actor_train.device_mapping:
        if starts_servers(job):
            return None
        where = "where the engine's servers do" if engine != "hf_infer" and used else "on actor_train's devices"
        return f"rollouts run {where}"
    return None
