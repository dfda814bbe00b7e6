"""Whether an engine samples a job's rollouts, and what keeps it from that."""

from __future__ import annotations

from collections.abc import Iterator

from roll_batching.config.diagnostics import Problem
from roll_batching.config.job_keys import JobKeys


def uses_engine(job: JobKeys) -> bool:
    """Whether rollouts are sampled by an engine, not by the model in training."""
    role = job.actor_infer
    if role.strategy_args.strategy_name == "hf_infer":
        return job.actor_train.model_args.model_name_or_path is not None
    return not role.strategy_args.runs_on_megatron and bool(role.engine_args.urls)


def engine_problems(job: JobKeys) -> Iterator[Problem]:
    """What keeps the engine that `job` names from sampling."""
    role, path = job.actor_infer, ("actor_infer", "engine_args", "urls")
    name = role.strategy_args.strategy_name
    urls = role.engine_args.urls
    if urls and name not in ("sglang", "vllm"):
        yield Problem(path, f"is read by sglang and vllm, and actor_infer.strategy_args.strategy_name is {name}")
    elif urls and job.actor_train.model_args.model_name_or_path is None:
        yield Problem(path, "needs a model that starts from a model directory (pretrain): engines read such ones")
    for url in urls:
        if not url.startswith(("http://", "https://")):
            yield Problem(path, f"has {url!r}; write http://host:port")
    if len(set(urls)) < len(urls):
        yield Problem(path, "names a server twice")
    if job.asynchronous and uses_engine(job):
        text = "needs rollouts that wait for training: those ahead of it come from a process with the Megatron model"
        yield Problem(("async_generation_ratio",), f"{text}; set it to 0, or leave the engine out")
