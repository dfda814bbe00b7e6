"""NeMo-RL's section `policy.generation`: what samples rollouts, on which devices, and how far ahead of training."""

from __future__ import annotations

from typing import Any

from roll_batching.jobs.conversion.nemo_rl_given import Given

_SECTION = "policy.generation"
_ROLE = ("actor_infer", "strategy_args")
_SAMPLING = ("actor_infer", "generating_args")
_HELD_OUT = ("validation", "generating_args")
_ALL: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
"""By key of a sampling: its value where a file says null."""
_ENGINES = ("vllm", "sglang")
_OF_VLLM = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "gpu_memory_utilization",
    "max_model_len",
    "enforce_eager",
    "enable_prefix_caching",
)
"""Keys of `vllm_cfg` that are options of vLLM's own."""
_OF_MEGATRON = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "sequence_parallel",
)
"""Keys of `mcore_generation_config` that lay out the model that samples."""
_NOT_SGLANGS = ("model_path", "random_seed", "skip_tokenizer_init", "sglang_server_config", "sglang_router_config")
"""Keys of `sglang_cfg` that follow from the job, or are none of SGLang's own."""
SERVERS = "the job's servers follow from actor_infer: engine_args, strategy_config and device_mapping"


def devices(given: Given, task: str) -> None:
    """Which devices train, and, where an engine samples, which are its own."""
    nodes, each = given.take("cluster.num_nodes", 1), given.take("cluster.gpus_per_node", 1)
    total, own = nodes * each, 0
    if task == "grpo" and given.peek(f"{_SECTION}.colocated.enabled", True) is False:
        resources = given.peek(f"{_SECTION}.colocated.resources") or {}
        own = min(total - 1, (resources.get("num_nodes") or 1) * (resources.get("gpus_per_node") or each))
    backend = given.peek(f"{_SECTION}.backend", "vllm")
    apart = own and (backend in _ENGINES or (backend == "megatron" and nodes == 1))
    text = "the devices that train" + (" and generate" if task == "grpo" else "")
    if own:
        text = "the devices that train; generation has others of its own"
        if not apart:
            text = "the devices that train, which also generate; there, generation has devices of its own"
    given.draft.put(("actor_train", "device_mapping"), f"list(range(0,{total - own}))", "cluster", text)
    if task != "grpo" or not (backend in _ENGINES or apart):
        return
    key = f"{_SECTION}.colocated"
    if own:
        where = f"list(range({total - own},{total}))"
        given.draft.put(("actor_infer", "device_mapping"), where, key, "numbered after those that train")
    elif not _ahead(given):  # else the engine draws while the model trains
        text = "the engine sleeps while the model trains, and the model's states wait on the host while it samples"
        given.draft.put(("is_offload_states",), True, key, text)
    if nodes > 1:
        what = f"actor_infer.engine_args.urls: is missing: the file is for {nodes} machines, and the job starts servers"
        given.draft.missing.append(f"{what} on that of rank 0 alone; start them on the others yourself, and name all")


def generation(given: Given) -> None:
    """How rollouts and held-out answers are sampled, and by what."""
    backend = given.take(f"{_SECTION}.backend", "vllm")
    _sampling(given)
    if backend == "vllm":
        _vllm(given)
    elif backend == "sglang":
        _sglang(given)
    else:
        given.draft.put((*_ROLE, "strategy_name"), "megatron_infer", f"{_SECTION}.backend")
        if backend == "megatron":
            for name in _OF_MEGATRON:
                given.move(f"{_SECTION}.mcore_generation_config.{name}", (*_ROLE, "strategy_config", name))
        else:
            text = f"{backend}: no such engine exists here, and the model in training samples; vllm and sglang do"
            given.draft.meanings[(*_ROLE, "strategy_name")] = text
    _ahead_of_training(given)


def _sampling(given: Given) -> None:
    for name, plain in _ALL.items():
        training, held_out = given.take(f"{_SECTION}.{name}"), f"{_SECTION}.val_{name}"
        if training is not None:
            given.draft.put((*_SAMPLING, name), training, f"{_SECTION}.{name}")
        if given.peek(held_out, training) != training:
            value = given.peek(held_out)
            value = plain if value is None else value
            greedy = name == "temperature" and not value
            given.draft.put((*_HELD_OUT, "do_sample" if greedy else name), False if greedy else value, held_out)
        given.take(held_out)
    answers = given.take("grpo.val_num_generations_per_prompt")
    if answers not in (None, 1):
        given.draft.put((*_HELD_OUT, "num_return_sequences"), answers, "grpo.val_num_generations_per_prompt")
    for name in ("stop_token_ids", "stop_strings"):
        given.off(f"{_SECTION}.{name}", why="a response ends at the tokenizer's end token, or the model's stop tokens")


def _vllm(given: Given) -> None:
    given.draft.put((*_ROLE, "strategy_name"), "vllm", f"{_SECTION}.backend")
    section, options = f"{_SECTION}.vllm_cfg", (*_ROLE, "strategy_config")
    for name in _OF_VLLM:
        given.move(f"{section}.{name}", (*options, name))
    precision = given.take(f"{section}.precision")
    if precision == "fp8":
        given.draft.leave_out(f"{section}.precision", "refused", "fp8: engines compute in the model's precision")
    elif precision is not None:
        given.draft.put((*options, "dtype"), precision, f"{section}.precision")
    cache = given.take(f"{section}.kv_cache_dtype")
    if cache not in (None, "auto"):
        given.draft.leave_out(f"{section}.kv_cache_dtype", "refused", f"{cache}: its scales are not measured for now")
    experts, tensor = given.take(f"{section}.expert_parallel_size", 1), given.peek(f"{section}.tensor_parallel_size", 1)
    tensor = given.draft.values["actor_infer"]["strategy_args"].get("strategy_config", {}).get(_OF_VLLM[0], tensor)
    if experts is not None and experts > 1:
        key = f"{section}.expert_parallel_size"
        text = "experts are divided over the devices of tensor_parallel_size"
        text += "" if experts == tensor else f", which are {tensor}; there, over {experts}, in data-parallel engines"
        given.draft.put((*options, "enable_expert_parallel"), True, key, text)
    mode = given.take(f"{section}.logprobs_mode")
    if mode not in (None, "processed_logprobs"):
        sampling = given.draft.values["actor_infer"].get("generating_args", {})
        plain = all(sampling.get(name, value) == value for name, value in _ALL.items())
        text = f"{mode}: log-probs are those at the sampling temperature, which the loss computes, too"
        given.draft.leave_out(f"{section}.logprobs_mode", "idle" if plain else "refused", text)
    for name, value in (given.take(f"{section}.env_vars") or {}).items():
        text = "reaches all of the job's processes and its servers"
        given.draft.put(("actor_infer", "system_envs", name), str(value), f"{section}.env_vars.{name}", text)
    for name in list(given.peek(f"{_SECTION}.vllm_kwargs") or {}):
        given.move(f"{_SECTION}.vllm_kwargs.{name}", (*options, name))


def _sglang(given: Given) -> None:
    given.draft.put((*_ROLE, "strategy_name"), "sglang", f"{_SECTION}.backend")
    section = f"{_SECTION}.sglang_cfg"
    for name in list(given.peek(section) or {}):
        key = f"{section}.{name}"
        if name in _NOT_SGLANGS:
            given.take(key)
            given.draft.leave_out(key, "idle", SERVERS)
        elif name == "dp_size" and given.peek(key) not in (None, 1):
            size = given.take(key)
            why = f"{size}: a server has the devices of tp_size x pp_size; there are as many servers as fit instead"
            given.draft.leave_out(key, "idle", why)
        else:
            given.move(key, (*_ROLE, "strategy_config", name))


def _ahead(given: Given) -> int:
    """RL steps that rollouts may be ahead of training; 0 where they are not."""
    if given.peek("grpo.async_grpo.enabled"):
        return int(given.peek("grpo.async_grpo.max_trajectory_age_steps", 1))
    sampler = given.peek("async_rl.sampler")
    if not isinstance(sampler, dict):
        return 0
    in_order = sampler.get("name", "in_order") == "in_order"
    return int(sampler.get("max_lookahead_versions" if in_order else "max_staleness_versions", 1))


def _ahead_of_training(given: Given) -> None:
    ahead, section = _ahead(given), "grpo.async_grpo"
    key = f"{section}.max_trajectory_age_steps" if given.peek(f"{section}.enabled") else "async_rl.sampler"
    if ahead:
        text = "rollouts are trained on in the order in which they were asked for"
        given.draft.put(("async_generation_ratio",), ahead, key, text)
    if ahead and given.take(f"{section}.in_flight_weight_updates"):
        text = "a response is drawn with the weights of one step; newer ones wait until it is done"
        given.draft.leave_out(f"{section}.in_flight_weight_updates", "refused", text)
    rest = given.take(section)
    if isinstance(rest, dict) and ahead:
        for name in ("max_generation_failures", "recompute_kv_cache_after_weight_updates"):
            if name in rest:
                text = "engine_args.retries and sampler_restarts say what failures do; caches end with their weights"
                given.draft.leave_out(f"{section}.{name}", "idle", text)
    elif rest is not None:
        given.draft.leave_out(section, "idle", "is off, as it is here")
    given.take("async_rl.sampler")
