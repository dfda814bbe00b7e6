"""Rules of RL: sampling in separate processes, dynamic sampling, rewards, advantages, engine corrections, critics."""

from __future__ import annotations

import math
from collections.abc import Iterator

from roll_batching.jobs.config.advantages import ADVANTAGE_ESTIMATORS, GAE, compares_states
from roll_batching.jobs.config.diagnostics import Problem
from roll_batching.jobs.config.engine_rules import (
    SERVED,
    corrects_engine,
    uses_engine,
)
from roll_batching.jobs.config.job_keys import JobKeys
from roll_batching.jobs.config.layout_rules import differing_keys, layout_problems, sampling_role

# ---- sampling in separate processes


def async_problems(job: JobKeys) -> Iterator[Problem]:
    """Keys that exclude sampling in a separate process."""
    if not job.has_sampler or not job.max_steps:
        return
    if job.asynchronous:
        yield from _old_log_probs(job)
    estimator = ADVANTAGE_ESTIMATORS.get(job.adv_estimator)
    if estimator is not None and estimator.greedy:
        text = (
            f"{estimator.name} needs greedy completions from the current weights, which a separate sampler cannot give"
        )
        cure = "set async_generation_ratio to 0" if job.asynchronous else "leave actor_infer.device_mapping out"
        yield Problem(("adv_estimator",), f"{text}; {cure}, or choose another")


def _old_log_probs(job: JobKeys) -> Iterator[Problem]:
    where = ("actor_train", "logprob_plan")
    plan = job.actor_train.logprob_plan
    if plan == "none":
        text = "none assumes that the current weights sampled, which is wrong under async_generation_ratio"
        yield Problem(where, f"{text}; leave it out, or use rollout")
    elif plan != "rollout" and not corrects_engine(job):
        text = (
            f"{plan} takes old log-probs from the current weights, but older ones sampled (async_generation_ratio): "
            "use rollout, or correct for them with train_infer_correction.is_weight or loss_args.engine_ratio_cap "
            "(truncated importance sampling)"
        )
        yield Problem(where, text)


# ---- dynamic sampling


def dynamic_sampling_problems(job: JobKeys) -> Iterator[Problem]:
    """Settings that exclude dynamic sampling."""
    here = ("dynamic_sampling",)
    if not job.dynamic_sampling or not job.max_steps:
        return
    if job.task != "grpo":
        yield Problem(here, f"compares rewards, which task: {job.task} does not have; set it to false")
        return
    if job.group_size < 2:
        text = "compares the responses to one prompt, and there is one: raise num_return_sequences_in_group"
        yield Problem(here, text)
    if job.asynchronous:
        text = "needs async_generation_ratio: 0, since the prompts of later steps are asked before a step is known to"
        yield Problem(here, f"{text} need more")
    if job.actor_train.data_args.domain_interleave_probs is not None:
        text = "would change the shares of domains that domain_interleave_probs fixes; leave one of the two out"
        yield Problem(here, text)
    estimator = ADVANTAGE_ESTIMATORS.get(job.adv_estimator)
    if estimator is not None and estimator.greedy:
        yield Problem(
            here, f"does not work with the greedy responses of {estimator.name}; choose another adv_estimator"
        )


# ---- shaped rewards


def reward_shaping_problems(job: JobKeys) -> Iterator[Problem]:
    """Problems of `reward_scaling` and `overlong_buffer`."""
    scaling, buffer = job.reward_scaling, job.overlong_buffer
    given = "reward_scaling" if scaling is not None else "overlong_buffer"
    if not job.shapes_rewards or not job.max_steps:
        return
    if job.task != "grpo":
        yield Problem((given,), f"changes rewards, which task: {job.task} does not have; leave it out")
        return
    estimator = ADVANTAGE_ESTIMATORS.get(job.adv_estimator)
    if estimator is not None and estimator.greedy:
        text = (
            f"does not change the rewards of the greedy responses that {estimator.name} compares with; choose another"
        )
        yield Problem((given,), f"{text} adv_estimator")
    if scaling is not None:
        for key in ("source", "target"):
            low, high = getattr(scaling, f"{key}_min"), getattr(scaling, f"{key}_max")
            if not (math.isfinite(low) and math.isfinite(high) and low < high):
                yield Problem(("reward_scaling", f"{key}_min"), f"is {low}, not below {key}_max {high}")
    if buffer is not None:
        longest = buffer.response_length or job.response_length
        if longest is not None and buffer.length > longest:
            yield Problem(("overlong_buffer", "length"), f"is {buffer.length}, more than the {longest} of a response")
        if not math.isfinite(buffer.penalty):
            yield Problem(("overlong_buffer", "penalty"), f"is {buffer.penalty}, no number to subtract")


# ---- groups


def group_problems(job: JobKeys) -> Iterator[Problem]:
    """Groups that cannot be compared: given as one response, or of greedy decoding, whose responses are the same."""
    args, size = job.actor_infer.generating_args, job.group_size
    if job.is_supervised or not job.max_steps:
        return
    is_given = "num_return_sequences_in_group" in job.model_fields_set  # resolved settings have it, too
    if is_given and (job.has_reward or job.rollout_function is not None):
        yield from single_responses(job)
    key = args.greedy
    if key is None or size < 2 or job.rollout_function is not None:
        return
    text = f"is {args.greedy_value}: greedy decoding makes the {size} responses of a prompt equal, and nothing is"
    cure = {"do_sample": "set do_sample to true", "top_k": "raise top_k, or set it to 0"}.get(key, f"raise {key}")
    text += f" learned from comparing them; {cure}, or num_return_sequences_in_group to 1"
    yield Problem(("actor_infer", "generating_args", key), text)


def single_responses(job: JobKeys) -> Iterator[Problem]:
    """Groups of one response, where the advantage estimator compares responses."""
    estimator = ADVANTAGE_ESTIMATORS.get(job.adv_estimator)
    if job.task == "grpo" and estimator is not None and estimator.compares and job.group_size < 2:
        text = f"is {job.group_size}: {estimator.name} compares the responses of a prompt and needs at least 2; raise"
        yield Problem(("num_return_sequences_in_group",), f"{text} it, or set adv_estimator to reinforce")


# ---- GiGPO


def gigpo_problems(job: JobKeys) -> Iterator[Problem]:
    """What GiGPO lacks, and keys that it excludes."""
    if not compares_states(job.adv_estimator) or job.is_supervised or job.task == "distill" or not job.max_steps:
        return
    if job.rollout_function is None:
        text = "gigpo compares the turns of samples that reach equal states; set rollout_function to a function that "
        text += "returns states and a reward for each turn (docs/rollouts.md), or choose grpo"
        yield Problem(("adv_estimator",), text)
    elif job.has_reward:
        key = "reward_function" if job.reward_function is not None else "rewards"
        yield Problem((key,), "scores whole samples, and gigpo reads a reward for each turn, which rollout_function "
                      "returns; leave it out")  # fmt: skip
    if job.norm_std_type in ("batch", "running"):
        text = f"is {job.norm_std_type}; gigpo compares groups of states: group divides by their deviation, ~ does not"
        yield Problem(("norm_std_type",), text)
    if job.advantages_of_tokens:
        key = "add_token_level_kl" if job.add_token_level_kl else "gamma"
        text = "makes advantages of tokens, and gigpo has those of turns (step_reward_gamma); leave it out"
        yield Problem((key,), text)
    if job.shapes_rewards:
        key = "reward_scaling" if job.reward_scaling is not None else "overlong_buffer"
        yield Problem((key,), "changes rewards of whole samples, and gigpo reads those of turns; leave it out")
    if not job.episode_reward_weight and not job.step_reward_weight:
        yield Problem(("step_reward_weight",), "is 0 beside episode_reward_weight: 0, which leaves no advantage")


# ---- replayed experts


def router_replay_problems(job: JobKeys) -> Iterator[Problem]:
    """Settings that exclude `router_replay`."""
    train, path = job.actor_train, ("actor_train", "router_replay", "mode")
    mode, model = train.router_replay.mode, train.model_args.architecture
    if mode == "disabled" or job.task != "grpo":
        return
    if model is not None and model.moe is None:
        yield Problem(path, f"is {mode}, but the model has no mixture of experts (architecture.moe); leave it out")
        return
    if mode == "R3" and not (uses_engine(job) and job.actor_infer.strategy_args.strategy_name in SERVED):
        text = "is R3, router replay with the experts of the sampler, which servers return: set actor_infer."
        text += "strategy_args.strategy_name to sglang or vllm and pretrain to a model directory"
        yield Problem(path, f"{text}; or use R2, which replays the experts of the pass of old log-probs")
    elif mode == "R3" and job.rollout_function is not None:
        text = "is R3, and rollout_function makes samples of several generations, whose experts it does not return"
        yield Problem(path, f"{text}; use R2")
    elif mode == "R2" and train.logprob_plan in ("none", "rollout"):
        text = f"is R2: it records experts in the pass of old log-probs, which logprob_plan: {train.logprob_plan} omits"
        yield Problem(path, f"{text}; set logprob_plan to train or own")
    if train.strategy_args.strategy_config.has_cp_per_pack:
        text = f"is {mode}, which needs one context-parallel size; set context_parallel_size to a number instead of"
        yield Problem(path, f"{text} auto")


# ---- differences between trainer and engine


_KEY = "train_infer_correction"


def train_infer_problems(job: JobKeys) -> Iterator[Problem]:
    """Contradictions in the section, and keys of the job that exclude it."""
    correction = job.train_infer_correction
    if correction is None or job.is_supervised or not job.max_steps:
        return
    if job.task == "distill":
        yield Problem((_KEY,), "concerns old log-probs, which task: distill does not have; leave it out")
        return
    for path, text in correction.problems():
        yield Problem((_KEY, *path), text)
    if job.loss_args.get("engine_ratio_cap") is not None:
        text = f"corrects in the loss what {_KEY} corrects before it; keep one of the two"
        yield Problem(("loss_args", "engine_ratio_cap"), text)
    plan = job.actor_train.logprob_plan
    if plan in ("none", "rollout"):
        cause = "computes no old log-probs" if plan == "none" else "takes the sampler's log-probs for old ones"
        text = f"{plan} {cause}, so {_KEY} has nothing to compare; use train or own"
        yield Problem(("actor_train", "logprob_plan"), text)
    if job.drop_zero_advantage_groups:
        text = f"leaves groups without old log-probs, which {_KEY} reads; set it to false"
        yield Problem(("drop_zero_advantage_groups",), text)


# ---- critics


def uses_critic(job: JobKeys) -> bool:
    """Whether the job builds and trains a critic."""
    return job.adv_estimator == GAE and job.critic is not None and bool(job.max_steps) and not job.is_supervised


def critic_problems(job: JobKeys) -> Iterator[Problem]:
    """Problems of the critic and its keys."""
    for name, role in job.roles.items():
        if name != "critic" and role.model_args.value_head:
            text = "is true; only the role `critic` has a value head: leave it out here"
            yield Problem((name, "model_args", "value_head"), text)
        if name != "critic" and role.model_args.value_head_std:
            text = "belongs to a value head, which only the role `critic` has: leave it out here"
            yield Problem((name, "model_args", "value_head_std"), text)
    if job.adv_estimator == GAE and job.critic is None and not job.is_supervised:
        text = "gae needs the role `critic`; add that section (`critic: {}` takes actor_train's model), or choose "
        yield Problem(("adv_estimator",), f"{text}reinforce_plus_plus, grpo or rloo, which need no critic")
    if not uses_critic(job):
        return
    assert job.critic is not None
    if job.critic_warmup >= job.max_steps:
        text = f"is {job.critic_warmup} of max_steps: {job.max_steps}, so that no step would train the policy; lower it"
        yield Problem(("critic_warmup",), text)
    if not job.critic.model_args.value_head:
        yield Problem(("critic", "model_args", "value_head"), "is false, and a critic computes values; leave it out")
    mine, policy = job.critic.model_args.architecture, job.actor_train.model_args.architecture
    if mine is not None and policy is not None and mine.vocab_size < policy.vocab_size:
        text = f"is {mine.vocab_size:,}, and the policy samples {policy.vocab_size:,} tokens, which the critic reads: "
        yield Problem(("critic", "model_args", "architecture", "vocab_size"), f"{text}choose a critic with as many")
    if job.own_devices("critic") is not None:
        text = "differs from actor_train's: the critic shares its devices for now; leave it out here"
        yield Problem(("critic", "device_mapping"), text)
    for key in differing_keys(job.critic, job.actor_train):
        text = "differs from actor_train's: the critic shares its parallel sizes for now; leave it out here"
        yield Problem(("critic", "strategy_args", "strategy_config", key), text)
    if job.batch_balance:
        text = "is true, and the critic's mini-batches are drawn over all ranks; set it to false under gae"
        yield Problem(("batch_balance",), text)
    yield from layout_problems("critic", job.critic)


# ---- lengths


def length_problems(job: JobKeys) -> Iterator[Problem]:
    """Lengths that do not fit each other."""
    response, longest = job.response_length, job.sequence_length
    if job.is_supervised:
        return
    if job.max_steps and response is not None and longest is not None and "sequence_length" in job.model_fields_set:
        if longest < job.prompt_length + response:
            text = f"is {longest}, less than prompt_length {job.prompt_length} + response_length {response}"
            yield Problem(("sequence_length",), f"{text}; leave it or response_length out")
    for role in ("actor_infer", "validation"):
        tokens = getattr(job, role).generating_args.max_new_tokens
        if tokens is not None and response is not None and tokens > response:
            path = (role, "generating_args", "max_new_tokens")
            yield Problem(path, f"is {tokens}, more than the job's response_length {response}")
    tokens = job.actor_infer.generating_args.max_new_tokens
    limit, new_tokens = job.actor_infer.generating_args.max_tokens_in_cache, tokens or response
    layout = sampling_role(job).strategy_args.strategy_config
    if limit is not None and new_tokens is not None:
        needed = job.prompt_length + new_tokens + (layout.tensor_model_parallel_size - 1) * layout.sequence_parallel
        if limit < needed:
            path = ("actor_infer", "generating_args", "max_tokens_in_cache")
            yield Problem(path, f"is {limit}, but one prompt and its response may need {needed}; raise it")
