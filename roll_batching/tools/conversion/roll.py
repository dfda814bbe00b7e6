"""Translates ROLL's files: sections that have another place here, and keys with another meaning.

Most keys of ROLL are ours, too, and need no translation.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from roll_batching.jobs.config.advantages import GAE
from roll_batching.jobs.config.diagnostics import dotted
from roll_batching.jobs.config.foreign_keys import FOREIGN_KEYS, MEDIA
from roll_batching.jobs.config.job_keys import JobKeys
from roll_batching.jobs.config.key_paths import field_at
from roll_batching.tools.conversion.draft import Draft
from roll_batching.tools.conversion.foreign_file import section_at
from roll_batching.tools.conversion.layouts import complete_fp8
from roll_batching.tools.conversion.precision import convert_roll_precision
from roll_batching.tools.conversion.roll_agentic import convert_agentic
from roll_batching.tools.conversion.roll_defaults import ROLL, apply_defaults, pipeline_of
from roll_batching.tools.conversion.roll_distillation import (
    convert_on_policy,
    convert_texts,
    record_origins,
    rename_students,
)
from roll_batching.tools.conversion.roll_environments import AGENTIC, convert_environments, take_environments
from roll_batching.tools.conversion.roll_rewards import REWARD_WORKERS, divide_prompts, translate_rewards
from roll_batching.tools.conversion.train_infer import convert_roll_section

_UNSUPPORTED: tuple[tuple[str, str], ...] = (
    ("custom_envs", AGENTIC),
    (
        "reward_normalization",
        "rewards per turn are not supported; norm_mean_type and norm_std_type normalise rewards",
    ),
    ("reward_model", REWARD_WORKERS),
)
"""(Unsupported section or key of ROLL, reason for leaving it out)."""
_PAIR_KEYS = ("chosen_key", "rejected_key", "beta", "ipo", "label_smoothing")
"""Keys of ROLL's DPO pipeline."""


def draft_of_roll(source: str, data: dict[str, Any]) -> Draft:
    """Converts composed settings of ROLL. `source`: name of the file in messages."""
    data = copy.deepcopy(data)
    draft = Draft(source, framework="ROLL")
    on_policy = rename_students(draft, data)
    convert_roll_precision(draft, data)
    pipeline = "rlvr" if on_policy else pipeline_of(data)
    if pipeline == "rlvr" and not on_policy and data.get("adv_estimator") == GAE and data.get("critic") is None:
        data["critic"] = {}
        lack = "critic: is missing: ROLL's would have no device; it has actor_train's here, and ROLL's other defaults"
        draft.missing.append(lack)
    environments = take_environments(draft, data) if pipeline == "agentic" else None
    apply_defaults(draft, data, pipeline)
    if environments is not None:
        convert_agentic(draft, data, section_at(environments, "train_env_manager"))
    if isinstance(kept := data.pop("max_ckpt_to_keep", None), int) and kept > 0:
        data["save_total_limit"], draft.origins["save_total_limit",] = kept, "max_ckpt_to_keep"
    for key, why in _UNSUPPORTED:
        if data.pop(key, None) is not None:
            draft.leave_out(key, "refused", why)
    supervised, student = data.pop("sft_train", None), data.pop("student", None)
    pairs = {key: data.pop(key) for key in _PAIR_KEYS if key in data}
    validation = data.pop("validation", None)
    convert_roll_section(draft, data)
    translate_rewards(draft, data)
    if environments is not None:
        for key in [key for key in data if field_at((key,)) is None and key not in FOREIGN_KEYS[JobKeys]]:
            del data[key]
            draft.leave_out(key, *ROLL.data["agentic"].get(key, ROLL.data["agentic"]["others"]))
    _images(draft, data)
    _frozen_encoders(draft, data)
    draft.values = data
    if data.get("rewards") and "actor_train.data_args.response" in draft.defaults:
        meaning = "ROLL's reward workers compare with the column ground_truth"
        draft.put(("actor_train", "data_args", "response"), "ground_truth", "rewards", meaning)
    divide_prompts(draft)
    _heads(draft)
    _policy_gradient(draft)
    _aggregation(draft)
    if isinstance(supervised, dict):
        _supervised(draft, supervised)
    if pipeline == "dpo":
        _preferences(draft, pairs)
    if isinstance(student, dict):
        convert_texts(draft, student)
    if isinstance(validation, dict):
        _validation(draft, validation)
    if on_policy:
        convert_on_policy(draft)
    _reference(draft)
    complete_fp8(draft)
    for role in ("actor_train", "actor_infer", "reference"):
        for key, meaning in ROLL.data["meanings"].items():
            draft.meanings.setdefault((role, *key.split(".")), meaning)
    if environments is not None:
        convert_environments(draft, environments)
    if {"eval_file_name", "seeds"}.isdisjoint(section_at(draft.values, "actor_train", "data_args")):
        meaning = "the file names no held-out prompts: there is no evaluation"
        draft.put(("eval_samples",), 0, "validation.data_args.file_name", meaning)
    return draft


_VARIANTS: Mapping[str, str] = {"ppo": "policy", "vanilla": "gpg", "topr": "topr", "cispo": "cispo"}
"""Our loss by `pg_variant` of ROLL's ActorPGWorker."""
_CISPO_RANGE = 0.1
"""Default of `cispo_epsilon_low` and `cispo_epsilon_high`, which files of ROLL cannot set."""


def _heads(draft: Draft) -> None:
    """Converts `mtp_training_mode` of the policy. Gradients of standalone heads stop before the model."""
    role = section_at(draft.values, "actor_train")
    mode, key = role.get("mtp_training_mode"), "actor_train.mtp_training_mode"
    if mode not in ("standalone", "joint"):
        return
    del role["mtp_training_mode"]
    layout = ("actor_train", "strategy_args", "strategy_config")
    if not section_at(draft.values, *layout).get("mtp_num_layers"):
        draft.put((*layout, "mtp_num_layers"), 1, key, "one head, as such models have")
    draft.put((*layout, "mtp_detach_heads"), mode == "standalone", key)


def _policy_gradient(draft: Draft) -> None:
    """Translates `pg_variant` of ROLL's ActorPGWorker to a loss."""
    role = section_at(draft.values, "actor_train")
    # Taken even if another variant makes them idle: the loader does not know these keys.
    weights = {name: role.pop(f"topr_{name}_weight", None) for name in ("positive", "negative")}
    variant = role.pop("pg_variant", None)
    if variant is None:
        return
    where = "actor_train.pg_variant"
    if "pg_worker" not in str(role.get("worker_cls")):
        draft.leave_out(where, "idle", "only ROLL's ActorPGWorker reads it, and worker_cls names another worker")
        return
    if variant not in _VARIANTS:
        draft.leave_out(where, "refused", f"there is no such loss here; {', '.join(_VARIANTS)} are translated")
        return
    draft.put(("loss_function",), _VARIANTS[variant], where)
    if variant == "cispo":
        draft.put(("use_pg_clip_range",), True, where)
        for key in ("pg_clip_low", "pg_clip_high"):
            draft.put((key,), _CISPO_RANGE, where, "ROLL's cispo always clips at this value, whatever pg_clip is")
    for name, weight in weights.items():
        if variant == "topr" and weight is not None:
            draft.put(("loss_args", f"{name}_weight"), weight, f"actor_train.topr_{name}_weight")
    if draft.values.pop("importance_sampling", "token") != "token":
        draft.leave_out("importance_sampling", "idle", "ROLL's ActorPGWorker takes a ratio per token")


def _aggregation(draft: Draft) -> None:
    """Converts `seq-mean-token-sum-norm` to `token-sum` with ROLL's divisor.

    ROLL divides the sum over all sequences by their padded length less one (the last token predicts none), and not by
    the number of sequences. Samples are padded to `sequence_length`. Source: `roll/utils/functionals.py:274`.
    """
    if draft.values.get("loss_agg_mode") != "seq-mean-token-sum-norm":
        return
    longest = draft.values.get("sequence_length")
    if longest is None:
        parts = [draft.values.get("prompt_length", 1024), draft.values.get("response_length")]
        longest = sum(parts) if all(isinstance(part, int) for part in parts) else None
    meaning = "ROLL's seq-mean-token-sum-norm adds up all sequences, and divides by their padded length"
    draft.put(("loss_agg_mode",), "token-sum", "loss_agg_mode", meaning)
    if not isinstance(longest, int):
        draft.missing.append("loss_agg_length: the divisor of the loss: ROLL's sequence_length - 1")
        return
    role = section_at(draft.values, "actor_train")
    varies = any(role.get(key) for key in ("use_sequence_packing", "use_dynamic_batching_in_train"))
    meaning = "sequence_length - 1; in ROLL, that of each micro-batch or packed sequence" if varies else ""
    draft.put(("loss_agg_length",), max(1, longest - 1), "loss_agg_mode", meaning)


_PIXELS: Mapping[str, int] = {"image_max_pixels": 4096 * 4096, "image_min_pixels": 4 * 28 * 28}
"""Limits of an image with ROLL's defaults."""


def _images(draft: Draft, data: dict[str, Any]) -> None:
    """Sets `data_args.images` if actor_train has pixel limits; leaves out the other keys of images and videos."""
    train = section_at(data, "actor_train", "data_args")
    if limits := [key for key in _PIXELS if train.get(key) is not None]:
        where = f"actor_train.data_args.{limits[0]}"
        meaning = "ROLL's key; a place without an image, or an image without a place, is an error here"
        draft.put(("actor_train", "data_args", "images"), "images", where, meaning)
        train["images"] = "images"
        if train.get("tag") is None:
            train["tag"], draft.origins["actor_train", "data_args", "tag"] = "data_source", where
        draft.missing.append(
            "actor_train.data_args.response: write reward_model.ground_truth of ROLL's lines into a column of this name"
        )
        for key, default in _PIXELS.items():
            if train.get(key) is None:
                train[key], draft.origins["actor_train", "data_args", key] = default, where
        _serve_with_sglang(draft, section_at(data, "actor_infer", "strategy_args"))
    for role in ("actor_train", "actor_infer", "reference", "sft_train", "student"):
        texts = section_at(data, role, "data_args")
        for key in [key for key in texts if str(key).startswith(("image_", "video_", "audio_"))]:
            if role == "actor_train" and key in _PIXELS:
                continue
            del texts[key]
            if key in _PIXELS:
                draft.leave_out(f"{role}.data_args.{key}", "idle", "limits are actor_train's")
            else:
                draft.leave_out(f"{role}.data_args.{key}", "refused", MEDIA)


_SGLANG = {"gpu_memory_utilization": "mem_fraction_static", "tensor_parallel_size": "tp_size"}
"""SGLang's name of an option, by vLLM's name."""


def _serve_with_sglang(draft: Draft, strategy: dict[str, Any]) -> None:
    """Replaces vLLM, which takes no images here, by SGLang; leaves out options that only vLLM has."""
    if strategy.get("strategy_name") != "vllm":
        return
    where = "actor_infer.strategy_args"
    meaning = "SGLang samples: it takes tokens and images together"
    draft.put(("actor_infer", "strategy_args", "strategy_name"), "sglang", f"{where}.strategy_name", meaning)
    strategy["strategy_name"] = "sglang"
    options = strategy.get("strategy_config") or {}
    strategy["strategy_config"] = {ours: options[theirs] for theirs, ours in _SGLANG.items() if theirs in options}
    for name in options.keys() - _SGLANG.keys():
        draft.leave_out(f"{where}.strategy_config.{name}", "idle", "an option of vLLM, and SGLang samples")


_ENCODER = ("vision_model", "model.visual", "visual")
"""Names of the whole vision encoder."""
_ENCODERS = ("vision_model", "audio_model", "talker", "code2wav", "model.visual", "visual")
"""Beginnings of the names that ROLL gives to modules outside the text model."""


def _frozen_encoders(draft: Draft, data: dict[str, Any]) -> None:
    """Leaves out frozen modules that are not built here: encoders, except the vision encoder of a job with images."""
    for role in ("actor_train", "critic", "sft_train"):
        model = section_at(data, role, "model_args")
        frozen = model.get("freeze_module_prefix")
        if role == "actor_train" and frozen in _ENCODER and "images" in section_at(data, role, "data_args"):
            model["freeze_module_prefix"] = "visual"
            continue
        if not isinstance(frozen, str):
            continue
        kept = [name for name in map(str.strip, frozen.split(",")) if not name.startswith(_ENCODERS)]
        if len(kept) < len(frozen.split(",")):
            why = "encoders are not built: of a model with some, the text model trains, and an export copies them"
            draft.leave_out(f"{role}.model_args.freeze_module_prefix", "idle", why)
            del model["freeze_module_prefix"]
            if kept:
                model["freeze_module_prefix"] = ",".join(kept)


def _supervised(draft: Draft, role: dict[str, Any]) -> None:
    """Translates the role `sft_train` to actor_train of `task: sft`."""
    draft.put(("task",), "sft", "sft_train")
    epochs = section_at(role, "training_args").pop("num_train_epochs", 1)
    if draft.values.pop("max_steps", None) is not None:
        draft.leave_out("max_steps", "idle", "ROLL's SFT does not read it, but num_train_epochs")
    meaning = "texts are shuffled anew in every epoch; ROLL keeps their order"
    draft.put(("num_train_epochs",), epochs, "sft_train.training_args.num_train_epochs", meaning)
    for key, value in role.items():
        draft.put(("actor_train", key), value, f"sft_train.{key}")
        record_origins(draft, ("actor_train", key), ("sft_train", key), value)
    _chat(draft, {"prompt": ("prompt_key", "instruction"), "response": ("response_key", "output")})
    for key, ours in (("query_key", "query"), ("system_key", "system")):
        if (name := draft.values.pop(key, None)) is not None:
            draft.put(("actor_train", "data_args", ours), name, key)
    meaning = "a longer text is an error that names it; ROLL truncates it"
    draft.meanings["sequence_length",] = meaning


def _preferences(draft: Draft, settings: dict[str, Any]) -> None:
    """Converts `settings`, the keys of ROLL's DPO pipeline (`_PAIR_KEYS`), to `task: dpo`."""
    draft.put(("task",), "dpo", "chosen_key")
    draft.put(("loss_function",), "ipo" if settings.get("ipo") else "dpo", "ipo")
    draft.put(("loss_args", "beta"), settings.get("beta", 0.1), "beta")
    if settings.get("label_smoothing") and not settings.get("ipo"):
        draft.put(("loss_args", "label_smoothing"), settings["label_smoothing"], "label_smoothing")
    _chat(draft, {"prompt": ("", "instruction")})
    for key in ("chosen", "rejected"):
        draft.put(("actor_train", "data_args", key), settings.get(f"{key}_key", key), f"{key}_key")
    arguments = section_at(draft.values, "actor_train", "training_args")
    meaning = "counts sequences, two of each pair; ROLL counts pairs"
    for path in (
        ("actor_train", "training_args", "per_device_train_batch_size"),
        ("actor_train", "infer_batch_size"),
        ("reference", "infer_batch_size"),
    ):
        rows = section_at(draft.values, *path[:-1]).get(path[-1])
        if rows is not None and (not isinstance(rows, int) or isinstance(rows, bool)):
            draft.leave_out(dotted(path), "refused", "is not a whole number: 2 is written, the sequences of one pair")
            rows = 1
        if rows is not None:
            draft.put(path, 2 * rows, dotted(path), meaning)
    arguments.pop("num_train_epochs", None)  # ROLL reads max_steps instead
    meaning = "a pair with more tokens is an error that names it; ROLL leaves it out"
    draft.meanings["sequence_length",] = meaning


def _chat(draft: Draft, keys: Mapping[str, tuple[str, str]]) -> None:
    """Marks texts as turns of a chat, as in ROLL. `keys`: (key in the file, its default) by our key."""
    for ours, (key, default) in keys.items():
        draft.put(("actor_train", "data_args", ours), draft.values.pop(key, None) or default, key or "data_args")
    meaning = "texts go through the tokenizer's chat template; in ROLL, through the one that `template` names"
    draft.put(("actor_train", "data_args", "chat"), True, "data_args.template", meaning)


def _validation(draft: Draft, role: dict[str, Any]) -> None:
    """Translates the role `validation`: the file and sampling of the evaluation."""
    texts = role.pop("data_args", None) or {}
    name = texts.pop("file_name", None)
    if name is not None:
        draft.put(("actor_train", "data_args", "eval_file_name"), name, "validation.data_args.file_name")
    for key in texts:
        draft.leave_out(f"validation.data_args.{key}", "idle", "held-out prompts are read like those of actor_train")
    if (sampling := role.pop("generating_args", None)) is not None and "task" not in draft.values:
        draft.put(("validation", "generating_args"), sampling)
    for key in role:
        draft.leave_out(f"validation.{key}", "idle", "the evaluation runs in the job's own processes")


def _reference(draft: Draft) -> None:
    """Replaces an engine or a Hugging Face model as the reference's strategy by Megatron."""
    strategy = section_at(draft.values, "reference", "strategy_args")
    name = strategy.get("strategy_name")
    if isinstance(name, str) and not name.startswith("megatron"):
        strategy.pop("strategy_config", None)
        meaning = f"the reference runs on Megatron, in actor_train's layout; in ROLL on {name}"
        draft.put(("reference", "strategy_args", "strategy_name"), "megatron_infer", meaning=meaning)
