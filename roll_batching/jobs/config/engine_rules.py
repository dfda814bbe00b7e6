"""Rules for rollout engines: whether an engine samples, who starts its servers, which log-probs it returns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from roll_batching.jobs.config.diagnostics import Problem
from roll_batching.jobs.config.job_keys import JobKeys
from roll_batching.jobs.config.rollout_keys import NEMO_GYM
from roll_batching.settings.batching import LogprobPlan

SERVED = ("sglang", "vllm")
"""Engines that run as servers."""
RAW, PROCESSED = "raw_logprobs", "processed_logprobs"
"""Modes of vLLM's `--logprobs-mode`."""
_READS = "and logprob_plan: rollout, engine_ratio_cap or train_infer_correction has the loss read them"
"""End of the errors about an engine's log-probs."""
_SET_BY_JOB = ("model", "model_path", "host", "port")
"""Server options that the job sets."""
_SIZES = (("tensor_parallel_size", "tp_size"), ("pipeline_parallel_size", "pp_size"))
"""Options whose product is the number of devices of a server; SGLang accepts both names of each."""


def corrects_engine(job: JobKeys) -> bool:
    """Whether the loss corrects for the difference between trainer and sampler by weights."""
    correction = job.train_infer_correction
    return job.loss_args.get("engine_ratio_cap") is not None or (
        correction is not None and correction.is_weight is not None
    )


def reads_sampled_log_probs(job: JobKeys) -> bool:
    """Whether training reads the log-probs with which tokens were sampled."""
    return logprob_plan_of(job) == "rollout" or corrects_engine(job) or job.train_infer_correction is not None


def logprob_plan_of(job: JobKeys) -> LogprobPlan:
    """Source of old log-probs; by default the sampler in an asynchronous job without correction."""
    train = job.actor_train
    if job.asynchronous and "logprob_plan" not in train.model_fields_set and not corrects_engine(job):
        return "rollout" if job.train_infer_correction is None else train.chosen_logprob_plan
    return train.chosen_logprob_plan


def uses_engine(job: JobKeys) -> bool:
    """Whether an engine samples rollouts. Engines read model directories, so the model must start from one."""
    names_engine = not job.actor_infer.strategy_args.runs_on_megatron
    return names_engine and job.actor_train.model_args.model_name_or_path is not None


def starts_servers(job: JobKeys) -> bool:
    """Whether the job starts the servers of its engine."""
    role = job.actor_infer
    return uses_engine(job) and role.strategy_args.strategy_name in SERVED and not role.engine_args.urls


def server_size(job: JobKeys) -> int:
    """Number of devices of one server that the job starts."""
    options, size = job.actor_infer.strategy_args.engine_options, 1
    for names in _SIZES:
        size *= next((int(options[name]) for name in names if options.get(name) is not None), 1)
    return size


def server_devices(job: JobKeys) -> list[tuple[int, ...]]:
    """Device numbers of each server that the job starts; without a device_mapping one server, with an empty tuple."""
    mapping, size = job.actor_infer.device_mapping, server_size(job)
    if mapping is None:
        return [()]
    return [mapping[start : start + size] for start in range(0, len(mapping), size)]


def shares_devices(job: JobKeys) -> bool:
    """Whether servers that the job starts share devices with actor_train."""
    engine_devices, shared = job.actor_infer.device_mapping, job.actor_train.device_mapping
    return engine_devices is None or shared is None or bool(set(engine_devices) & set(shared))


def engine_sleeps(job: JobKeys) -> bool:
    """Whether the engine frees its device memory while the model trains.

    Engines on separate devices and engines that sample during training do not.
    """
    shares = not starts_servers(job) or shares_devices(job)
    return uses_engine(job) and job.is_offload_states and not job.asynchronous and shares


def ignored_option(name: str, value: Any) -> str | None:
    """Why a server option of a ROLL file is not passed to the server, or None if it is."""
    if name == "sleep_level":
        return "servers always sleep at level 2, without their weights, and get new ones when they wake up"
    if name == "load_format" and value == "dummy":
        return "a server loads later weights in the format of the first ones, and dummy loads none"
    return None


def server_options(job: JobKeys) -> dict[str, Any]:
    """Command-line options of a server that the job starts: those of the file, and those that the loss needs."""
    args = job.actor_infer.strategy_args
    derived: dict[str, Any] = {}
    if args.strategy_name == "vllm" and wrong_log_probs(job, PROCESSED) and not wrong_log_probs(job, RAW):
        derived = {"logprobs_mode": RAW}
    if job.actor_train.router_replay.mode == "R3":
        derived["enable_return_routed_experts"] = True
    return derived | {name: value for name, value in args.engine_options.items() if ignored_option(name, value) is None}


def reads_engine_log_probs(job: JobKeys) -> bool:
    """Whether the loss reads the engine's log-probs, as old log-probs or for the correction."""
    return uses_engine(job) and reads_sampled_log_probs(job)


def wrong_log_probs(job: JobKeys, mode: str | None) -> str | None:
    """Why the loss cannot read log-probs of a vLLM server in `mode` (None: not known yet), or None if it can.

    The trainer's log-probs are at `logprob_temperature`, before top_p and top_k. vLLM's raw ones are at temperature 1;
    its processed ones at the sampling temperature, after top_p and top_k. Greedy ones are raw in both modes.
    """
    args, wanted = job.actor_infer.generating_args, job.logprob_temperature
    truncated = args.do_sample and (args.top_p < 1 or args.top_k > 0)
    sampled = args.temperature if args.do_sample else 1.0
    fits = {RAW: wanted == 1, PROCESSED: wanted == sampled and not truncated}
    if any(fits.values()) if mode is None else fits.get(mode, False):  # a mode not known yet may be either
        return None
    left = ", of the tokens that top_p and top_k leave" if truncated else ""
    descriptions = {RAW: "at temperature 1", PROCESSED: f"at temperature {sampled:g}{left}"}
    if mode is None:
        before = " before top_p and top_k" if truncated else ""
        available = " or ".join(dict.fromkeys(descriptions.values()))
        return f"the loss needs log-probs at temperature {wanted:g}{before}, and vLLM has them only {available}"
    if mode not in descriptions:
        return f"vLLM has no log-probs in the mode {mode}; use {RAW} or {PROCESSED}"
    cure = f"; use {RAW if mode == PROCESSED else PROCESSED}" if any(fits.values()) else ""
    return (
        f"vLLM's log-probs in the mode {mode} are {descriptions[mode]}, but the loss needs temperature {wanted:g}{cure}"
    )


def engine_problems(job: JobKeys) -> Iterator[Problem]:
    """Problems of the engine that `job` names."""
    role, path = job.actor_infer, ("actor_infer", "engine_args", "urls")
    name = role.strategy_args.strategy_name
    urls = role.engine_args.urls
    if urls and name not in SERVED:
        yield Problem(
            path, f"is read by sglang and vllm, and actor_infer.strategy_args.strategy_name is {name}; leave it out"
        )
    elif urls and job.actor_train.model_args.model_name_or_path is None:
        yield Problem(path, "needs a model that starts from a model directory (pretrain), which engines read")
    for url in urls:
        if not url.startswith(("http://", "https://")):
            yield Problem(path, f"has {url!r}; write http://host:port")
    if len(set(urls)) < len(urls):
        yield Problem(path, "names a server twice; name each once")
    if role.engine_args.command == []:
        yield Problem(("actor_infer", "engine_args", "command"), "is empty; leave it out, or name a program")
    if role.engine_args.update_weights_from == "distributed":
        yield from _distributed(job)
    if name == "vllm" and reads_engine_log_probs(job):
        yield from _unfit_vllm_log_probs(job)
    if name == "sglang" and reads_engine_log_probs(job):
        yield from _unfit_sglang_log_probs(job)
    if starts_servers(job):
        yield from _own_servers(job)


def _unfit_sglang_log_probs(job: JobKeys) -> Iterator[Problem]:
    """The problem that the loss reads SGLang's log-probs at another temperature than the trainer's.

    SGLang's are at the sampling temperature, before top_p and top_k; those of greedy responses at temperature 1.
    """
    args, wanted = job.actor_infer.generating_args, job.logprob_temperature
    sampled = args.temperature if args.do_sample else 1.0
    if wanted == sampled:
        return
    greedy = "" if args.do_sample else " of greedy responses"
    text = f"SGLang's log-probs{greedy} are at temperature {sampled:g}, but those of the loss at {wanted:g}, {_READS}"
    if job.actor_train.logprob_temperature is None:
        cure = f"set actor_train.logprob_temperature to {sampled:g}"
        yield Problem(("actor_infer", "generating_args", "temperature"), f"{text}: {cure}")
    else:
        cure = f"set it to {sampled:g}, or use logprob_plan: train without a correction"
        yield Problem(("actor_train", "logprob_temperature"), f"{text}: {cure}")


def _unfit_vllm_log_probs(job: JobKeys) -> Iterator[Problem]:
    """The problem that the loss reads vLLM's log-probs from another distribution than the trainer's."""
    args, option = job.actor_infer.generating_args, job.actor_infer.strategy_args.engine_options.get("logprobs_mode")
    mode = option if starts_servers(job) else None
    wrong_in_any_mode = wrong_log_probs(job, None)
    if wrong_in_any_mode is not None:
        key = "temperature" if args.do_sample is False else "top_p" if args.top_p < 1 else "top_k"
        text = f"{wrong_in_any_mode}, {_READS}: set actor_train.logprob_temperature to 1, or leave top_p and top_k out"
        yield Problem(("actor_infer", "generating_args", key), text)
    elif mode is not None and (wrong_in_mode := wrong_log_probs(job, str(mode))) is not None:
        path = ("actor_infer", "strategy_args", "strategy_config", "logprobs_mode")
        yield Problem(path, f"{wrong_in_mode}, {_READS}")


def _distributed(job: JobKeys) -> Iterator[Problem]:
    """Problems of `update_weights_from: distributed`, weights over process groups."""
    role, path = job.actor_infer, ("actor_infer", "engine_args", "update_weights_from")
    name, engine_devices, shared = role.strategy_args.strategy_name, role.device_mapping, job.actor_train.device_mapping
    if name == "vllm":
        text = "vLLM's servers take weights only from vLLM's own communicator, which the job's processes do not have"
        yield Problem(path, f"distributed is for sglang: {text}; use disk")
    elif name != "sglang":
        yield Problem(
            path, f"distributed is for sglang, and actor_infer.strategy_args.strategy_name is {name}; use disk"
        )
    elif job.asynchronous:
        text = "the sampler process reads weights from model directories"
        yield Problem(path, f"distributed is not for async_generation_ratio: {text}; use disk")
    elif starts_servers(job) and engine_devices is not None and set(engine_devices) & set(shared or ()):
        text = "NCCL allows one rank per device"
        yield Problem(path, f"distributed needs servers on devices that actor_train does not use: {text}; use disk")


def _own_servers(job: JobKeys) -> Iterator[Problem]:
    """Problems of servers that the job starts."""
    role = job.actor_infer
    options, path = role.strategy_args.engine_options, ("actor_infer", "strategy_args", "strategy_config")
    for name, value in options.items():
        if name in _SET_BY_JOB:
            yield Problem((*path, name), "is set by the job: servers get pretrain and a free port; leave it out")
        if name in sum(_SIZES, ()) and value is not None and (type(value) is not int or value < 1):
            yield Problem((*path, name), f"expected a whole number of at least 1, got {value!r}")
            return
    mapping, size = role.device_mapping, server_size(job)
    stages = next((options[name] for name in _SIZES[1] if options.get(name) is not None), 1)
    if stages > 1 and role.engine_args.update_weights_from == "distributed":
        text = "SGLang's servers take weights from a process group under tensor parallelism alone"
        yield Problem((*path, "pp_size"), f"{text}; use update_weights_from: disk")
    if mapping is not None and len(mapping) % size:
        text = f"names {len(mapping)} devices, but a server has {size} (tensor x pipeline parallel size)"
        yield Problem(("actor_infer", "device_mapping"), f"{text}; name a multiple of {size}")


def gym_problems(job: JobKeys) -> Iterator[Problem]:
    """Problems of NeMo-Gym's rollout function: missing addresses of Gym and of the engine, updates in flight."""
    if job.rollout_function != NEMO_GYM:
        return
    role = job.actor_infer
    if job.asynchronous and job.in_flight_updates:
        text = "is true, and an update would interrupt the requests of NeMo-Gym's agents, which make them themselves"
        yield Problem(("in_flight_updates",), f"{text}; set it to false")
    if not isinstance(job.rollout_args.get("url"), str):
        text = "is missing: the address of NeMo-Gym's head server, http://host:11000 (docs/rollouts.md)"
        yield Problem(("rollout_args", "url"), text)
    if role.strategy_args.strategy_name != "vllm":
        text = f"is {role.strategy_args.strategy_name}: NeMo-Gym's agents call a vLLM server, so set vllm"
        yield Problem(("actor_infer", "strategy_args", "strategy_name"), text)
    elif not role.engine_args.urls:
        text = "is missing: NeMo-Gym's agents call the engine, so start it yourself, and name it here and in Gym's "
        text += "policy_base_url"
        yield Problem(("actor_infer", "engine_args", "urls"), text)
