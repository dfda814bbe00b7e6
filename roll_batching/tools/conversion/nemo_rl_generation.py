"""NeMo-RL's section `policy.generation`: the engine, its devices, and asynchronous rollouts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roll_batching.jobs.config.rollout_keys import NEMO_GYM
from roll_batching.tools.conversion.foreign_file import (
    HELD_OUT,
    SAMPLING,
    STOP,
    STRATEGY,
    ForeignFile,
    Given,
    section_at,
)
from roll_batching.tools.conversion.foreign_job import Devices
from roll_batching.tools.conversion.nemo_rl_file import RL_TASKS
from roll_batching.tools.conversion.train_infer import SECTION

_SECTION = "policy.generation"
_UNRESTRICTED: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
"""Value of each sampling key that means no restriction, as null does in NeMo-RL."""
_ENGINES = ("vllm", "sglang")
_NOT_SGLANG = ("model_path", "random_seed", "skip_tokenizer_init", "sglang_server_config", "sglang_router_config")
"""Keys of `sglang_cfg` that the job sets, or that SGLang does not have."""
SERVERS = "servers are configured by engine_args, strategy_config and device_mapping of actor_infer"


def read_devices(file: ForeignFile, task: str) -> Devices:
    """Reads the devices of training and, if the engine does not share them, of the engine."""
    nodes, each = file.take("cluster.num_nodes") or 1, file.take("cluster.gpus_per_node") or 1
    total, engine_gpus = nodes * each, 0
    if task in RL_TASKS and file.peek(f"{_SECTION}.colocated.enabled", True) is False:
        resources = file.peek(f"{_SECTION}.colocated.resources") or {}
        engine_gpus = min(total - 1, (resources.get("num_nodes") or 1) * (resources.get("gpus_per_node") or each))
    backend = file.peek(f"{_SECTION}.backend", "vllm")
    # A Megatron engine on separate devices needs one machine here.
    is_separate = engine_gpus and (backend in _ENGINES or (backend == "megatron" and nodes == 1))
    meaning = "the devices that train" + (" and generate" if task in RL_TASKS else "")
    if engine_gpus:
        meaning = "the devices that train; generation has other devices"
        if not is_separate:
            meaning = "the devices that train, which also generate; in NeMo-RL generation has other devices"
    training, key = Given(total - engine_gpus, "cluster", meaning), f"{_SECTION}.colocated"
    if task not in RL_TASKS or not (backend in _ENGINES or is_separate):
        return Devices(training)
    sleeps = "" if engine_gpus or _steps_ahead(file) else key  # an asynchronous engine samples while the model trains
    return Devices(training, Given(engine_gpus, key) if engine_gpus else None, sleeps, nodes)


def convert_generation(file: ForeignFile) -> None:
    """Converts the engine, the sampling of rollouts and held-out answers, and asynchronous rollouts."""
    backend = file.take(f"{_SECTION}.backend", "vllm")
    _sampling(file)
    if backend == "vllm":
        _vllm(file)
    elif backend == "sglang":
        _sglang(file)
    else:
        file.draft.put((*STRATEGY, "strategy_name"), "megatron_infer", f"{_SECTION}.backend")
        if backend == "megatron":
            file.move_all("megatron_generation", f"{_SECTION}.mcore_generation_config")
        else:
            meaning = f"{backend}: there is no such engine here, so the training model samples; vllm and sglang exist"
            file.draft.meanings[(*STRATEGY, "strategy_name")] = meaning
    _async_rollouts(file)


def _sampling(file: ForeignFile) -> None:
    for name, plain in _UNRESTRICTED.items():
        training, held_out = file.take(f"{_SECTION}.{name}"), f"{_SECTION}.val_{name}"
        if training is not None:
            file.draft.put((*SAMPLING, name), training, f"{_SECTION}.{name}")
        if file.peek(held_out, training) != training:
            value = file.peek(held_out)
            value = plain if value is None else value
            greedy = name == "temperature" and not value
            file.draft.put((*HELD_OUT, "do_sample" if greedy else name), False if greedy else value, held_out)
        file.take(held_out)
    answers = file.take("grpo.val_num_generations_per_prompt")
    if answers not in (None, 1):
        file.draft.put((*HELD_OUT, "num_return_sequences"), answers, "grpo.val_num_generations_per_prompt")
    for name in ("stop_token_ids", "stop_strings"):
        file.expect_off(f"{_SECTION}.{name}", why=STOP)


def _vllm(file: ForeignFile) -> None:
    file.draft.put((*STRATEGY, "strategy_name"), "vllm", f"{_SECTION}.backend")
    section, options = f"{_SECTION}.vllm_cfg", (*STRATEGY, "strategy_config")
    file.move_all("vllm", section)
    precision = file.take(f"{section}.precision")
    if precision == "fp8":
        file.draft.leave_out(f"{section}.precision", "refused", "fp8: engines compute in the model's precision")
    elif precision is not None:
        file.draft.put((*options, "dtype"), precision, f"{section}.precision")
    cache = file.take(f"{section}.kv_cache_dtype")
    if cache not in (None, "auto"):
        file.draft.leave_out(f"{section}.kv_cache_dtype", "refused", f"{cache}: its scales are not measured for now")
    experts = file.take(f"{section}.expert_parallel_size", 1)
    tensor = section_at(file.draft.values, *options).get("tensor_parallel_size", 1)
    if experts is not None and experts > 1:
        key = f"{section}.expert_parallel_size"
        meaning = "experts are divided over the devices of tensor_parallel_size"
        meaning += "" if experts == tensor else f", {tensor}; in NeMo-RL over {experts}, in data-parallel engines"
        file.draft.put((*options, "enable_expert_parallel"), True, key, meaning)
    mode = file.take(f"{section}.logprobs_mode")
    if mode not in (None, "processed_logprobs"):
        sampling = file.draft.values["actor_infer"].get("generating_args", {})
        plain = all(sampling.get(name, value) == value for name, value in _UNRESTRICTED.items())
        why = f"{mode}: log-probs are at the sampling temperature, as those of the loss"
        file.draft.leave_out(f"{section}.logprobs_mode", "idle" if plain else "refused", why)
    for name, value in (file.take(f"{section}.env_vars") or {}).items():
        meaning = "is set for all processes of the job and its servers"
        file.draft.put(("actor_infer", "system_envs", name), str(value), f"{section}.env_vars.{name}", meaning)
    for name in list(file.peek(f"{_SECTION}.vllm_kwargs") or {}):
        file.move(f"{_SECTION}.vllm_kwargs.{name}", (*options, name))


def _sglang(file: ForeignFile) -> None:
    file.draft.put((*STRATEGY, "strategy_name"), "sglang", f"{_SECTION}.backend")
    section = f"{_SECTION}.sglang_cfg"
    for name in list(file.peek(section) or {}):
        key = f"{section}.{name}"
        if name in _NOT_SGLANG:
            file.take(key)
            file.draft.leave_out(key, "idle", SERVERS)
        elif name == "dp_size" and file.peek(key) not in (None, 1):
            size = file.take(key)
            why = f"{size}: a server has the devices of tp_size x pp_size; there are as many servers as fit instead"
            file.draft.leave_out(key, "idle", why)
        else:
            file.move(key, (*STRATEGY, "strategy_config", name))


def _steps_ahead(file: ForeignFile) -> int:
    """Most RL steps that rollouts run ahead of training; 0: synchronous."""
    if file.peek("grpo.async_grpo.enabled"):
        return int(file.peek("grpo.async_grpo.max_trajectory_age_steps", 1))
    sampler = file.peek("async_rl.sampler")
    if not isinstance(sampler, dict):
        return 0
    in_order = sampler.get("name", "in_order") == "in_order"
    return int(sampler.get("max_lookahead_versions" if in_order else "max_staleness_versions", 1))


def _obstacle_in_flight(job: Mapping[str, Any]) -> str:
    """Why the engine of `job` cannot take weights while it samples; empty if it can."""
    if job.get("rollout_function") == NEMO_GYM:
        return "NeMo-Gym's agents call the engine themselves"
    if section_at(job, *STRATEGY).get("strategy_name") not in _ENGINES:
        return "the sampler is no server"
    replay = section_at(job, "actor_train", "router_replay").get("mode")
    return "router replay R3 takes the experts of one generation" if replay == "R3" else ""


def _async_rollouts(file: ForeignFile) -> None:
    """Converts how far rollouts run ahead of training; leaves out the other keys of asynchronous rollouts."""
    ahead, section = _steps_ahead(file), "grpo.async_grpo"
    key = f"{section}.max_trajectory_age_steps" if file.peek(f"{section}.enabled") else "async_rl.sampler"
    if ahead:
        meaning = "rollouts are trained on in the order of their requests"
        if "engine_ratio_cap" not in file.draft.values.get("loss_args", {}) and SECTION not in file.draft.values:
            meaning += "; old log-probs are the sampler's, NeMo-RL computes them with the weights in training"
        file.draft.put(("async_generation_ratio",), ahead, key, meaning)
    in_flight = f"{section}.in_flight_weight_updates"
    if ahead and file.take(in_flight):
        if why := _obstacle_in_flight(file.draft.values):
            file.draft.leave_out(in_flight, "refused", f"{why}; new weights wait until responses are complete")
        else:
            file.draft.put(("in_flight_updates",), True, in_flight, "caches are computed again with the new weights")
    rest = file.take(section)
    if isinstance(rest, dict) and ahead:
        for name in ("max_generation_failures", "recompute_kv_cache_after_weight_updates"):
            if name in rest:
                why = "engine_args.retries and sampler_restarts handle failures; caches are dropped with their weights"
                file.draft.leave_out(f"{section}.{name}", "idle", why)
    elif rest is not None:
        file.draft.leave_out(section, "idle", "is off, as it is here")
    file.take("async_rl.sampler")
