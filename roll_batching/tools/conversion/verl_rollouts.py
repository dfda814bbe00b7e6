"""verl's sections `data` and `rollout`: prompts, sampling, engines and evaluation."""

from __future__ import annotations

import re
from typing import Any

from roll_batching.tools.conversion.foreign_file import DATA, REWARDS, STRATEGY, ForeignFile, Given, section_at
from roll_batching.tools.conversion.foreign_job import Evaluation
from roll_batching.tools.conversion.verl_file import ACTOR, MODEL, ROLLOUT

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
"""The engine's name of an option where verl has another name, by engine and verl's name."""
_FUNCTIONS = ("custom_reward_function", "reward.custom_reward_function")
"""Sections that name the user's reward function."""
_WITH_IMAGES = re.compile("vl", re.IGNORECASE)
"""Matches the name of a model that reads images."""


def _images(file: ForeignFile) -> None:
    """Converts the key of images if the file or the model's name says that there are images.

    verl has a default of the key for all models, so the key alone says nothing.
    """
    key, frozen = file.take("data.image_key"), file.take(f"{ACTOR}.freeze_vision_tower")
    name = str(file.peek(f"{MODEL}.path") or file.draft.values.get("pretrain") or "").rpartition("/")[2]
    # Composed files hold verl's defaults of all keys; a script has the keys that somebody wrote.
    is_default = key is None or (key == "images" and file.peek("data.video_key") is not None)
    if is_default and not _WITH_IMAGES.search(name) and not frozen:
        return
    meaning = "verl reads images of every model; here this key says that there are some"
    file.draft.put((*DATA, "images"), key or "images", "data.image_key", meaning)
    if frozen:
        file.draft.put(("actor_train", "model_args", "freeze_module_prefix"), "visual", f"{ACTOR}.freeze_vision_tower")


def convert_chat_template(file: ForeignFile, supervised: bool) -> None:
    """Converts the arguments of the chat template; verl reads those from columns in its SFT trainer only."""
    kwargs = file.take("data.apply_chat_template_kwargs")
    if isinstance(kwargs, dict) and kwargs:
        file.put((*DATA, "chat_template_kwargs"), kwargs, "data.apply_chat_template_kwargs")
    tools, thinking = file.take("data.tools_key"), file.take("data.enable_thinking_key")
    default = file.take("data.enable_thinking_default")
    columns = {"tools_key": tools, "enable_thinking_key": thinking, "enable_thinking_default": default}
    if not supervised:
        for key in [name for name, value in columns.items() if value is not None]:
            file.draft.leave_out(f"data.{key}", "idle", "verl reads it in its SFT trainer only")
        return
    file.put((*DATA, "tools"), tools, "data.tools_key")
    if thinking is not None:
        path = (*DATA, "chat_template_columns", "enable_thinking")
        file.put(path, thinking, "data.enable_thinking_key")
    if isinstance(default, bool | int):
        path = (*DATA, "chat_template_kwargs", "enable_thinking")
        file.put(path, bool(default), "data.enable_thinking_default", "of records without a value")


def convert_data(file: ForeignFile) -> None:
    """Converts prompts, their lengths and the reward."""
    convert_chat_template(file, supervised=False)
    key = "reward_model.ground_truth (data)"
    file.put((*DATA, "response"), "reward_model.ground_truth", key, "the right answer, in a section of a line")
    _images(file)
    if file.take("data.filter_overlong_prompts"):
        file.put((*DATA, "long_prompts"), "drop", "data.filter_overlong_prompts")
        file.take("data.truncation")
    file.check_all("long_prompts")
    _overlong_buffer(file)
    _reward_function(file)
    for name in ("num_workers", "reward_manager", "reward_model"):
        file.take(f"reward.{name}")
    for name in ("max_concurrent", "memory_limit_mb"):
        file.take(f"reward.sandbox_fusion.{name}")
    file.expect_off("reward.sandbox_fusion", "sandbox_fusion", why="code_tests runs code; set how in reward_args.run")


def _reward_function(file: ForeignFile) -> None:
    """Converts the user's reward function for verl; leaves out unsupported managers and verl's own rewards."""
    manager = _manager(file)
    file.take("reward_model.reward_manager")
    sections = [name for name in _FUNCTIONS if file.peek(f"{name}.path") is not None]
    for section in sections[:1]:
        path = file.take(f"{section}.path")
        meaning = "verl's contract: data_source, solution_str, ground_truth, extra_info"
        file.draft.put(("reward_function",), "verl_compute_score", f"{section}.path", meaning)
        file.draft.put(("reward_args", "path"), path, f"{section}.path")
        file.put(("reward_args", "name"), file.take(f"{section}.name"), f"{section}.name")
        kwargs = file.take(f"{section}.reward_kwargs")
        file.put(("reward_args", "reward_kwargs"), kwargs or None, f"{section}.reward_kwargs")
    for section in _FUNCTIONS:
        file.take(section)
    if manager not in (None, "naive", "dapo", *(("batch",) if sections else ())):  # dapo: a penalty for long responses
        file.draft.leave_out("reward.reward_manager.name", "refused", f"{manager}: {REWARDS}")
    if not sections:
        key = "reward (by data_source)"
        file.draft.leave_out(key, "refused", f"verl chooses a function by the data_source of a line: {REWARDS}")


def _manager(file: ForeignFile) -> Any:
    """Name of the reward manager."""
    return file.peek("reward.reward_manager.name") or file.peek("reward_model.reward_manager")


def _overlong_buffer(file: ForeignFile) -> None:
    """Converts the penalty for long responses, which only verl's reward manager `dapo` reads."""
    if _manager(file) != "dapo":
        for kwargs in ("reward_model.reward_kwargs", "reward.reward_kwargs"):
            if file.take(f"{kwargs}.overlong_buffer_cfg") is not None:
                why = "only verl's reward manager dapo reads it"
                file.draft.leave_out(f"{kwargs}.overlong_buffer_cfg", "idle", why)
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


def convert_engine(file: ForeignFile) -> bool:
    """Converts the engine that samples and its options; returns whether the job starts servers."""
    engine, key = file.take(f"{ROLLOUT}.name") or "vllm", f"{ROLLOUT}.name"
    if engine not in ("vllm", "sglang"):
        meaning = f"{engine}: there is no such engine here, so the training model samples; vllm and sglang exist"
        file.put((*STRATEGY, "strategy_name"), "megatron_infer", key, meaning)
        for name in _VLLM:
            file.leave_out(f"{ROLLOUT}.{name}", "idle", "the training model samples")
        return False
    if file.peek(f"{ROLLOUT}.dtype") == "bfloat16":
        file.take(f"{ROLLOUT}.dtype")
    meaning = ""
    if engine == "vllm" and "images" in section_at(file.draft.values, *DATA):
        engine, meaning = "sglang", "SGLang samples: it takes tokens and images together"
    file.put((*STRATEGY, "strategy_name"), engine, key, meaning)
    for name in _VLLM:
        ours = _SIZES[engine].get(name, name)
        if engine == "sglang" and ours == name:
            file.leave_out(f"{ROLLOUT}.{name}", "idle", "an option of vLLM, and SGLang samples")
        else:
            file.move(f"{ROLLOUT}.{name}", (*STRATEGY, "strategy_config", ours))
    for name in list(file.peek(f"{ROLLOUT}.engine_kwargs.{engine}") or {}):
        file.move(f"{ROLLOUT}.engine_kwargs.{engine}.{name}", (*STRATEGY, "strategy_config", name))
    file.check_all("engine")
    return True


def read_evaluation(file: ForeignFile) -> Evaluation:
    """Reads the evaluation; it is off without files, or if neither a period nor `val_before_train` asks for it."""
    period, first = Given(file.take("trainer.test_freq"), "trainer.test_freq"), file.take("trainer.val_before_train")
    section, files = f"{ROLLOUT}.val_kwargs", file.given("data.val_files")
    sampling = {name: file.given(f"{section}.{name}") for name in ("temperature", "top_p", "top_k")}
    does_sample, answers = file.take(f"{section}.do_sample"), file.given(f"{section}.n")
    if files is None or (not first and (not isinstance(period.value, int) or period.value <= 0)):
        return Evaluation(period, is_on=False)
    lack = "eval_samples: verl evaluates all held-out prompts: set the number of answers (default: 512)"
    file.draft.missing.append(lack)
    if does_sample is False or (sampling["temperature"] is not None and sampling["temperature"].value == 0):
        sampling = {"temperature": Given(0, f"{section}.do_sample")}
    return Evaluation(period, files=files, answers=answers, sampling=sampling)
