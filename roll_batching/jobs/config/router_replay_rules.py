"""Rules of router replay: which samplers and passes can give the experts of training."""

from __future__ import annotations

from collections.abc import Iterator

from roll_batching.jobs.config.diagnostics import Problem
from roll_batching.jobs.config.engine_rules import SERVED, uses_engine
from roll_batching.jobs.config.job_keys import JobKeys


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
