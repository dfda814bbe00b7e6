"""Features of a job, of which `support` makes pairs: tasks, sampling, rewards, advantages, data and batching."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import NamedTuple

from roll_batching.jobs.config.advantages import ADVANTAGE_ESTIMATORS, compares_states
from roll_batching.jobs.config.engine_rules import SERVED, corrects_engine, uses_engine
from roll_batching.jobs.config.job_keys import JobKeys
from roll_batching.jobs.config.layout_rules import parts_of
from roll_batching.jobs.config.objective_rules import wants_reference, whitens
from roll_batching.jobs.config.rl_rules import uses_critic
from roll_batching.jobs.config.task_rules import distills
from roll_batching.jobs.config.worker import WorkerConfig
from roll_batching.settings.fields import TRAINED
from roll_batching.settings.support import (
    DELTA_NETS,
    DROPOUT,
    ENGINE_LAYERS,
    FP8,
    HEADS,
    HYBRID,
    NO_ROTATION,
    ROUTER_LOSSES,
    VIRTUAL_STAGES,
    VISION,
    Feature,
)

_TRAIN, _LAYOUT = "actor_train", "actor_train.strategy_args.strategy_config"
_PLAN = f"{_TRAIN}.logprob_plan"
IMAGE_ENGINES = ("sglang",)
"""Engines that take images."""


def _rl(name: str, key: str, is_on: Callable[[JobKeys], object]) -> Feature:
    """A feature of jobs that sample, with at least one step."""
    return Feature(name, key, lambda job: not job.is_supervised and job.max_steps and is_on(job))


def _objective(name: str, key: str, is_on: Callable[[JobKeys], object]) -> Feature:
    """A feature of the objective of jobs that sample, also of those without a step."""
    return Feature(name, key, lambda job: not job.is_supervised and is_on(job))


def _replays(job: JobKeys, mode: str) -> bool:
    """Whether a mixture of experts is trained with this router replay."""
    return bool(REPLAY.is_on(job)) and not DENSE.is_on(job) and job.actor_train.router_replay.mode == mode


def _is_greedy(job: JobKeys) -> bool:
    estimator = ADVANTAGE_ESTIMATORS.get(job.adv_estimator)
    return estimator is not None and estimator.greedy


def _distilled(job: JobKeys) -> bool:
    return bool(job.max_steps) and distills(job) and job.teacher is not None and job.task in ("distill", "sft")


# ---- tasks

SUPERVISED = Feature("task: sft, dpo or kto", "task", lambda job: job.is_supervised)
ROLLOUTS = Feature("task: grpo or distill", "task", lambda job: not job.is_supervised)
KTO = Feature("task: kto", "task", lambda job: job.task == "kto")
DISTILL = Feature("task: distill", "task", lambda job: job.task == "distill")
NOT_GRPO = Feature("another task than grpo", "task", lambda job: job.task != "grpo")
NOT_SFT_OR_GRPO = Feature("another task than sft or grpo", "task", lambda job: job.task not in ("sft", "grpo"))

# ---- sampling

ASYNC = _rl("sampling ahead of training", "async_generation_ratio", lambda job: job.asynchronous)
IN_FLIGHT = _rl("updates in flight", "in_flight_updates", lambda job: job.asynchronous and job.in_flight_updates)
PARTIAL = _rl("partial rollouts", "partial_rollout", lambda job: job.asynchronous and job.partial_rollout)
STALE_TOKENS = _rl(
    "a limit of the age of tokens", "max_staleness", lambda job: IN_FLIGHT.is_on(job) and job.max_staleness is not None
)
ALTERNATING = _rl("updates between requests", IN_FLIGHT.key, lambda job: not job.in_flight_updates)
OWN_SAMPLER = _rl(
    "a sampler on other devices",
    "actor_infer.device_mapping",
    lambda job: job.own_devices("actor_infer") is not None and not job.asynchronous,
)
FUNCTION = _rl("a rollout function", "rollout_function", lambda job: job.rollout_function is not None)
NO_FUNCTION = _rl("no rollout function", "rollout_function", lambda job: job.rollout_function is None)
NO_SERVERS = _rl(
    "no servers",
    "actor_infer.strategy_args.strategy_name",
    lambda job: not (uses_engine(job) and job.actor_infer.strategy_args.strategy_name in SERVED),
)
SERVERS = _rl("servers that sample", NO_SERVERS.key, lambda job: not NO_SERVERS.is_on(job))
TEXT_ENGINE = _rl(
    "sampling with vllm or hf_infer",
    "actor_infer.strategy_args.strategy_name",
    lambda job: uses_engine(job) and job.actor_infer.strategy_args.strategy_name not in IMAGE_ENGINES,
)
GREEDY_ESTIMATOR = _rl("an estimator with greedy responses (remax)", "adv_estimator", _is_greedy)
DYNAMIC = Feature("dynamic sampling", "dynamic_sampling", lambda job: job.dynamic_sampling and job.max_steps)
SINGLE = _rl("single responses", "num_return_sequences_in_group", lambda job: job.task == "grpo" and job.group_size < 2)
SHARES = _rl(
    "shares of domains",
    f"{_TRAIN}.data_args.domain_interleave_probs",
    lambda job: job.actor_train.data_args.domain_interleave_probs is not None,
)

# ---- rewards, advantages, losses

SCALED = Feature("scaled rewards", "reward_scaling", lambda job: job.reward_scaling and job.max_steps)
OVERLONG = Feature(
    "a penalty for long responses",
    "overlong_buffer",
    lambda job: job.overlong_buffer and not job.reward_scaling and job.max_steps,
)
FUNCTION_REWARD = _rl("a reward function", "reward_function", lambda job: job.reward_function is not None)
DOMAIN_REWARDS = _rl("rewards of domains", "rewards", lambda job: job.rewards and job.reward_function is None)
GIGPO = _rl("gigpo", "adv_estimator", lambda job: job.task == "grpo" and compares_states(job.adv_estimator))
WIDE_NORM = _rl("deviations beyond a group", "norm_std_type", lambda job: job.norm_std_type in ("batch", "running"))
REWARD_KL = _objective("a divergence in the rewards", "add_token_level_kl", lambda job: job.add_token_level_kl)
DISCOUNT = _rl("a discount per token", "gamma", lambda job: job.advantages_of_tokens and not job.add_token_level_kl)
WHITENING = _objective(
    "whitened advantages per token",
    "whiten_advantages",
    lambda job: whitens(job) and job.advantages_of_tokens and not job.add_token_level_kl and not uses_critic(job),
)
GIVEN_WHITENING = _rl("whitened advantages", "whiten_advantages", lambda job: job.whiten_advantages)
LOSS_KL = _objective("a divergence in the loss", "kl_loss_coef", lambda job: job.kl_coef)
USES_KL = _objective("a divergence in the loss", "use_kl_loss", lambda job: job.use_kl_loss)
ENTROPY = _objective("an entropy bonus", "entropy_loss_coef", lambda job: job.entropy_loss_coef and not job.kl_coef)
DROPPED = _objective(
    "groups that are not computed", "drop_zero_advantage_groups", lambda job: job.drop_zero_advantage_groups
)
NO_REFERENCE = _objective("no reference", "reference", lambda job: job.reference is None)
CRITIC = Feature("a critic (gae)", "critic", uses_critic)
GIVEN_CRITIC = Feature("a critic", "critic", lambda job: job.critic is not None)
OWN_CRITIC = Feature(
    "a critic on other devices",
    "critic.device_mapping",
    lambda job: uses_critic(job) and job.own_devices("critic") is not None,
)
BATCH_BALANCE = Feature("ROLL's order of balancing", "batch_balance", lambda job: job.batch_balance)
CORRECTION = _rl("train_infer_correction", "train_infer_correction", lambda job: job.train_infer_correction is not None)
RATIO_CAP = _rl(
    "a correction in the loss",
    "loss_args.engine_ratio_cap",
    lambda job: job.loss_args.get("engine_ratio_cap") is not None,
)
NO_PLAN = _objective(
    "logprob_plan: none", _PLAN, lambda job: job.actor_train.logprob_plan == "none" and job.task == "grpo"
)
SAMPLED_PLAN = _objective("logprob_plan: rollout", _PLAN, lambda job: job.actor_train.logprob_plan == "rollout")
CURRENT_PLAN = _rl(
    "old log-probs of the current weights, uncorrected",
    _PLAN,
    lambda job: job.actor_train.logprob_plan in ("train", "own") and not corrects_engine(job),
)
REPLAY = _objective(
    "router replay",
    f"{_TRAIN}.router_replay.mode",
    lambda job: job.task == "grpo" and job.actor_train.router_replay.mode != "disabled",
)
REPLAY_2 = Feature("router replay R2", REPLAY.key, lambda job: _replays(job, "R2"))
REPLAY_3 = Feature("router replay R3", REPLAY.key, lambda job: _replays(job, "R3"))
DENSE = Feature(
    "a dense model",
    f"{_TRAIN}.model_args.architecture.moe",
    lambda job: (model := job.actor_train.model_args.architecture) is not None and model.moe is None,
)
TEACHER = Feature("a teacher", "teacher", _distilled)
STUDENT = Feature("task: distill with a teacher", "teacher", lambda job: _distilled(job) and job.task == "distill")

# ---- data and batching

STREAM = Feature("a stream of texts", "train", lambda job: job.stream is not None)
WARMUP = Feature("a warm-up phase", "warmup", lambda job: job.warmup is not None)
OTHER_OPTIMIZER = Feature(
    "a warm-up with another optimizer",
    "warmup.training_args.optimizer",
    lambda job: WARMUP.is_on(job) and job.warmup.training_args.optimizer != job.actor_train.training_args.optimizer,
)
BUDGET = Feature("token_budget", "token_budget", lambda job: job.token_budget > 0)
UNPACKED = Feature(
    "no packing",
    f"{_TRAIN}.use_sequence_packing",
    lambda job: not job.actor_train.use_sequence_packing and job.stream is None,
)
SHARED_PREFIXES = Feature(
    "shared prefixes",
    f"{_TRAIN}.sequence_packing_args.share_prefixes",
    lambda job: job.actor_train.use_sequence_packing and job.actor_train.sequence_packing_args.share_prefixes is True,
)
CP_PER_PACK = Feature(
    "a context-parallel size per pack",
    f"{_LAYOUT}.context_parallel_size",
    lambda job: job.actor_train.strategy_args.strategy_config.has_cp_per_pack,
)
SLICED = Feature(
    "slices of packs, also auto",
    f"{_LAYOUT}.pipeline_slices",
    lambda job: job.actor_train.strategy_args.strategy_config.pipeline_slices != 1,
)
ADAPTERS = Feature("adapters", f"{_TRAIN}.model_args.lora_target", lambda job: job.actor_train.model_args.lora_target)
ADAPTERS_AND_REFERENCE = Feature(
    "adapters with a reference", ADAPTERS.key, lambda job: ADAPTERS.is_on(job) and wants_reference(job)
)
OWN_REFERENCE = Feature(
    "a reference on other devices",
    "reference.device_mapping",
    lambda job: wants_reference(job) and job.own_devices("reference") is not None,
)
IMAGES = Feature("images", f"{_TRAIN}.data_args.images", lambda job: job.actor_train.data_args.images is not None)
CHARACTERS = Feature("tokenizer.type: char", "tokenizer.type", lambda job: job.tokenizer.type != "hf")
STREAM_SWITCH = Feature(STREAM.name, "train.train_policy.enable_dp_load_balancing", STREAM.is_on)
CRITIC_ESTIMATOR = Feature("an advantage estimator with a critic", "adv_estimator", uses_critic)

# ---- packing and layout of one role


class RoleOfJob(NamedTuple):
    """A role and its job, on which the features of `PACKING_REFUSALS` are tested."""

    name: str
    role: WorkerConfig
    job: JobKeys

    @property
    def has_cp_per_pack(self) -> bool:
        """Whether each pack of the role has its own context-parallel size.

        Other roles may inherit the setting of actor_train; it concerns them only where they pack.
        """
        packs = self.name == "actor_train" or (self.name != "actor_infer" and self.role.use_sequence_packing)
        return packs and self.role.strategy_args.strategy_config.has_cp_per_pack

    @property
    def keeps_activations(self) -> bool:
        """Whether the role is trained and keeps activations of its layers from forward to backward."""
        layout = self.role.strategy_args.strategy_config
        is_full = layout.recompute_granularity == "full" and layout.recompute_method in (None, "uniform")
        return self.name in TRAINED.names and not is_full

    @property
    def must_share_prefixes(self) -> bool:
        """Whether `share_prefixes` is true, so that packs of the role have to share prefixes, rather than auto."""
        packs = self.name != "actor_infer" and self.role.use_sequence_packing
        return packs and self.role.sequence_packing_args.share_prefixes is True


def _other_than(value: object, key: str) -> Feature:
    """The feature that the key `key` of a role has another value than `value`."""
    written = str(value).lower()
    return Feature(f"`{key}` other than {written}", key, lambda packing: attrgetter(key)(packing.role) != value)


SIZE_PER_PACK = Feature(
    CP_PER_PACK.name, "strategy_args.strategy_config.context_parallel_size", lambda packing: packing.has_cp_per_pack
)
NEEDED_FOR_SIZES = {
    "use_sequence_packing": True,
    "sequence_packing_args.algorithm": "load_balance",
    "sequence_packing_args.min_num_micro_batches_train": 1,
    "sequence_packing_args.min_num_micro_batches_forward": 1,
}
"""Values of a role's keys with which packs can have context-parallel sizes."""
OTHER_PACKING = {_other_than(value, key): f"{key}: {str(value).lower()}" for key, value in NEEDED_FOR_SIZES.items()}
OVERSIZE = "planning_args.oversize"
FEW_SHAPES = Feature(
    "packs of few lengths",
    "sequence_packing_args.pack_shapes",
    lambda packing: packing.role.sequence_packing_args.pack_shapes is not None,
)
OVERSIZE_ALONE = Feature(
    "longer sequences alone", OVERSIZE, lambda packing: packing.role.planning_args.oversize in ("alone", "slice")
)
OVERSIZE_SLICED = Feature(
    "longer sequences in slices", OVERSIZE, lambda packing: packing.role.planning_args.oversize == "slice"
)
KEPT_ACTIVATIONS = Feature(
    "training without full recompute",
    "strategy_args.strategy_config.recompute_granularity",
    lambda packing: packing.keeps_activations,
)


def _of_role(feature: Feature) -> Feature:
    """`feature` of a model or layout, tested on the model and layout of a `RoleOfJob`."""
    return Feature(feature.name, feature.key, lambda packing: feature.is_on(parts_of(packing.role)))


UNCUT = (ENGINE_LAYERS, DELTA_NETS, HYBRID, VISION, HEADS, VIRTUAL_STAGES, FP8, NO_ROTATION, ROUTER_LOSSES)
"""Features of a model or layout with which packs stay whole."""
ROLE_PARTS = {feature: _of_role(feature) for feature in (*UNCUT, DROPOUT)}
"""By feature of a model or layout, the same feature tested on a `RoleOfJob`."""
SHARED_PACKS = Feature(
    SHARED_PREFIXES.name, "sequence_packing_args.share_prefixes", lambda packing: packing.must_share_prefixes
)
JOB_BALANCE = Feature(BATCH_BALANCE.name, BATCH_BALANCE.key, lambda packing: BATCH_BALANCE.is_on(packing.job))
JOB_REPLAY = Feature(REPLAY.name, REPLAY.key, lambda packing: REPLAY.is_on(packing.job))
JOB_STREAM = Feature(STREAM.name, STREAM.key, lambda packing: STREAM.is_on(packing.job))
