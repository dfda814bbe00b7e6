"""verl's sections `data` and `rollout`: prompts, sampling, engines and evaluation."""

from __future__ import annotations

import re
from typing import Any

from roll_batching.tools.conversion.foreign_file import REWARDS, ForeignFile
from roll_batching.tools.conversion.verl_options import ACTOR, MODEL, ROLLOUT

_DATA = ("actor_train", "data_args")
_STRATEGY = ("actor_infer", "strategy_args")
_SAMPLING = ("actor_infer", "generating_args")
_HELD_OUT = ("validation", "generating_args")
_VLLM = (
    "gpu_memory_utilization enforce_eager max_model_len max_num_seqs max_num_batched_tokens enable_chunked_prefill "
    "enable_prefix_caching tensor_model_parallel_size pipeline_model_parallel_size"
).split()
_SIZES = {
    "vllm": {
        "tensor_model_parallel_size": "tensor_parallel_size",
        "pipeline_model_parallel_size": "pipeline_parallel_size",
    },
    "sglang": {
        "tensor_model_parallel_size": "tp_size",
        "pipeline_model_parallel_size": "pp_size",
        "gpu_memory_utilization": "mem_fraction_static",
        "max_model_len": "context_length",
        "max_num_seqs": "max_running_requests",
    },
}
"""By engine, its name of an option where verl has another."""


_FUNCTIONS = ("custom_reward_function", "reward.custom_reward_function")
"""Sections of a reward function of one's own."""
_WITH_IMAGES = re.compile("vl", re.IGNORECASE)
"""In the name of a model that reads images."""


def _images(file: ForeignFile) -> None:
    """The key of images where the file or the model's name tells of some: verl has a default for all models."""
    key, frozen = file.take("data.image_key"), file.take(f"{ACTOR}.freeze_vision_tower")
    name = str(file.peek(f"{MODEL}.path") or file.draft.values.get("pretrain") or "").rpartition("/")[2]
    # Composed files hold verl's defaults of all keys; a script has the keys that somebody wrote.
    is_default = key is None or (key == "images" and file.peek("data.video_key") is not None)
    if is_default and not _WITH_IMAGES.search(name) and not frozen:
        return
    text = "verl reads images of every model; here this key says that there are some"
    file.draft.put((*_DATA, "images"), key or "images", "data.image_key", text)
    if frozen:
        file.draft.put(("actor_train", "model_args", "freeze_module_prefix"), "visual", f"{ACTOR}.freeze_vision_tower")


def convert_chat_template(file: ForeignFile, supervised: bool) -> None:
    """Converts what the chat template reads beside the messages; verl reads columns in its SFT trainer only."""
    kwargs = file.take("data.apply_chat_template_kwargs")
    if isinstance(kwargs, dict) and kwargs:
        file.put((*_DATA, "chat_template_kwargs"), kwargs, "data.apply_chat_template_kwargs")
    tools, thinking = file.take("data.tools_key"), file.take("data.enable_thinking_key")
    default = file.take("data.enable_thinking_default")
    given = {"tools_key": tools, "enable_thinking_key": thinking, "enable_thinking_default": default}
    if not supervised:
        for key in [name for name, value in given.items() if value is not None]:
            file.draft.leave_out(f"data.{key}", "idle", "verl reads it in its SFT trainer only")
        return
    file.put((*_DATA, "tools"), tools, "data.tools_key")
    if thinking is not None:
        path = (*_DATA, "chat_template_columns", "enable_thinking")
        file.put(path, thinking, "data.enable_thinking_key")
    if isinstance(default, bool | int):
        path = (*_DATA, "chat_template_kwargs", "enable_thinking")
        file.put(path, bool(default), "data.enable_thinking_default", "of records without a value")


def convert_data(file: ForeignFile) -> None:
    """Converts prompts, their lengths and the reward."""
    convert_chat_template(file, supervised=False)
    file.move("data.train_files", (*_DATA, "file_name"))
    file.move("data.prompt_key", (*_DATA, "messages"), meaning="a list of messages, which go through the chat template")
    key = "reward_model.ground_truth (data)"
    file.draft.put((*_DATA, "response"), "reward_model.ground_truth", key, "the right answer, in a section of a line")
    _images(file)
    file.move("data.max_prompt_length", ("prompt_length",))
    file.move("data.max_response_length", ("response_length",))
    dropped, cut = file.take("data.filter_overlong_prompts"), file.take("data.truncation")
    if dropped:
        file.put((*_DATA, "long_prompts"), "drop", "data.filter_overlong_prompts")
    elif cut not in (None, "error"):
        file.draft.leave_out(
            "data.truncation", "refused", f"{cut}: a prompt that is too long is an error, or is left out"
        )
    if file.take("data.shuffle") is False:
        file.draft.leave_out("data.shuffle", "refused", "prompts are shuffled anew in every epoch")
    file.move("data.seed", ("seed",))
    _overlong_buffer(file)
    file.expect_off("reward.reward_model.enable", "reward_model.enable", why="reward models are not served for now")
    _reward_function(file)
    for name in ("num_workers", "reward_manager", "reward_model", "sandbox_fusion.max_concurrent"):
        file.take(f"reward.{name}")
    file.take("reward.sandbox_fusion.memory_limit_mb")
    file.expect_off("reward.sandbox_fusion", "sandbox_fusion", why="code_tests runs code; set how in reward_args.run")


def _reward_function(file: ForeignFile) -> None:
    """Verl's own function for rewards, and the manager that calls it."""
    manager = _manager(file)
    file.take("reward_model.reward_manager")
    found = [name for name in _FUNCTIONS if file.peek(f"{name}.path") is not None]
    for section in found[:1]:
        path = file.take(f"{section}.path")
        text = "verl's contract: data_source, solution_str, ground_truth, extra_info"
        file.draft.put(("reward_function",), "verl_compute_score", f"{section}.path", text)
        file.draft.put(("reward_args", "path"), path, f"{section}.path")
        file.put(("reward_args", "name"), file.take(f"{section}.name"), f"{section}.name")
        kwargs = file.take(f"{section}.reward_kwargs")
        file.put(("reward_args", "reward_kwargs"), kwargs or None, f"{section}.reward_kwargs")
    for section in _FUNCTIONS:
        file.take(section)
    if manager not in (None, "naive", "dapo", *(("batch",) if found else ())):  # dapo: a penalty for long responses
        file.draft.leave_out("reward.reward_manager.name", "refused", f"{manager}: {REWARDS}")
    if not found:
        key = "reward (by data_source)"
        file.draft.leave_out(key, "refused", f"verl chooses a function by the data_source of a line: {REWARDS}")


def _manager(file: ForeignFile) -> Any:
    """Name of the reward manager."""
    return file.peek("reward.reward_manager.name") or file.peek("reward_model.reward_manager")


def _overlong_buffer(file: ForeignFile) -> None:
    """The penalty for long responses of verl's reward manager `dapo`, the only one that reads it."""
    if _manager(file) != "dapo":
        for kwargs in ("reward_model.reward_kwargs", "reward.reward_kwargs"):
            if file.take(f"{kwargs}.overlong_buffer_cfg") is not None:
                text = "only verl's reward manager dapo reads it"
                file.draft.leave_out(f"{kwargs}.overlong_buffer_cfg", "idle", text)
        return
    for kwargs in ("reward_model.reward_kwargs", "reward.reward_kwargs"):
        section = f"{kwargs}.overlong_buffer_cfg"
        if file.peek(f"{section}.enable") is True and file.peek(f"{section}.penalty_factor") != 0:
            file.take(f"{section}.enable")
            file.move(f"{section}.len", ("overlong_buffer", "length"))
            file.move(f"{section}.penalty_factor", ("overlong_buffer", "penalty"))
            file.move(f"{kwargs}.max_resp_len", ("overlong_buffer", "response_length"))
            file.take(f"{section}.log")
        else:
            file.expect_off(section, why=REWARDS)


def convert_rollouts(file: ForeignFile, devices: int) -> None:
    """Converts sampling and the engine."""
    for name in ("temperature", "top_p", "top_k", "do_sample"):
        file.move(f"{ROLLOUT}.{name}", (*_SAMPLING, name))
    engine = file.take(f"{ROLLOUT}.name")
    if engine not in (None, "vllm", "sglang"):
        text = f"{engine}: there is no such engine here, so the training model samples; vllm and sglang exist"
        file.draft.put((*_STRATEGY, "strategy_name"), "megatron_infer", f"{ROLLOUT}.name", text)
        for name in _VLLM:
            if file.take(f"{ROLLOUT}.{name}") is not None:
                file.draft.leave_out(f"{ROLLOUT}.{name}", "idle", "the training model samples")
        return
    engine = engine or "vllm"
    if file.peek(f"{ROLLOUT}.dtype") == "bfloat16":
        file.take(f"{ROLLOUT}.dtype")
    text = ""
    if engine == "vllm" and "images" in file.draft.values.get("actor_train", {}).get("data_args", {}):
        engine, text = "sglang", "SGLang samples: it takes tokens and images together"
    file.draft.put((*_STRATEGY, "strategy_name"), engine, f"{ROLLOUT}.name", text)
    text = "the engine sleeps during training, and the model's states are offloaded during sampling"
    file.draft.put(("is_offload_states",), True, f"{ROLLOUT}.free_cache_engine", text)
    for name in _VLLM:
        ours = _SIZES[engine].get(name, name)
        if engine == "sglang" and ours == name:
            if file.take(f"{ROLLOUT}.{name}") is not None:
                file.draft.leave_out(f"{ROLLOUT}.{name}", "idle", "an option of vLLM, and SGLang samples")
        else:
            file.move(f"{ROLLOUT}.{name}", (*_STRATEGY, "strategy_config", ours))
    for name in list(file.peek(f"{ROLLOUT}.engine_kwargs.{engine}") or {}):
        file.move(f"{ROLLOUT}.engine_kwargs.{engine}.{name}", (*_STRATEGY, "strategy_config", name))
    for name in ("data_parallel_size", "expert_parallel_size"):
        size = file.take(f"{ROLLOUT}.{name}")
        if size not in (None, 1):
            text = (
                f"{size}: a server has the devices of its tensor and pipeline sizes; as many servers as fit are started"
            )
            file.draft.leave_out(f"{ROLLOUT}.{name}", "refused", text)
    if file.peek("trainer.nnodes") not in (None, 1) or devices > 8:
        what = (
            f"actor_infer.engine_args.urls: is missing: the file is for {devices} devices, and the job starts servers"
        )
        file.draft.missing.append(f"{what} only on the machine of rank 0; start them on the others, and name all")


def convert_evaluation(file: ForeignFile) -> None:
    """Converts the period, the files and the sampling of the evaluation."""
    period, first = file.take("trainer.test_freq"), file.take("trainer.val_before_train")
    section = f"{ROLLOUT}.val_kwargs"
    names = ("temperature", "top_p", "top_k", "do_sample", "n")
    sampling = {name: file.take(f"{section}.{name}") for name in names}
    files = file.take("data.val_files")
    if files is None or (not first and (not isinstance(period, int) or period <= 0)):
        file.draft.put(("eval_samples",), 0, "trainer.test_freq", "there is no evaluation")
        return
    file.put((*_DATA, "eval_file_name"), files, "data.val_files")
    text = "the policy is also evaluated before the first step and after the last"
    file.put(("eval_steps",), max(0, period or 0), "trainer.test_freq", text)
    text = "eval_samples: verl evaluates all held-out prompts: set the number of answers (default: 512)"
    file.draft.missing.append(text)
    greedy = sampling["do_sample"] is False or sampling["temperature"] == 0
    if greedy:
        file.put((*_HELD_OUT, "do_sample"), False, f"{section}.do_sample")
    else:
        for name in ("temperature", "top_p", "top_k"):
            file.put((*_HELD_OUT, name), sampling[name], f"{section}.{name}")
    if sampling["n"] not in (None, 1):
        file.put((*_HELD_OUT, "num_return_sequences"), sampling["n"], f"{section}.n")
