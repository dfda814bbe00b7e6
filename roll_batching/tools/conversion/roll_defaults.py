"""ROLL's defaults (`data/roll.yaml`), and values that its code overrides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from roll_batching.jobs.config.advantages import GAE
from roll_batching.jobs.config.diagnostics import dotted
from roll_batching.tools.conversion.draft import Draft
from roll_batching.tools.conversion.foreign_file import Tables, fill_defaults, section_at

Pipeline = Literal["rlvr", "agentic", "sft", "dpo", "distillation"]

ROLL = Tables("roll")
_TRAINED, _SAMPLED = ROLL.defaults("trained"), ROLL.defaults("sampled")
_LOGPROB_TEMPERATURE = 1.0
"""ROLL's log-probs do not divide the logits by the sampling temperature."""
_ROLES = ("actor_train", "actor_infer", "reference", "sft_train", "critic")
_UNNAMED_STRATEGY = "fsdp2_train"
_CODE = "ROLL's code sets it"


def pipeline_of(data: Mapping[str, Any]) -> Pipeline:
    """The pipeline of ROLL that a file is for."""
    if "train_env_manager" in data or ("custom_envs" in data and "rewards" not in data):
        return "agentic"
    if "sft_train" in data:
        return "sft"
    if not {"student", "student_train", "teacher"}.isdisjoint(data):
        return "distillation"
    return "rlvr" if {"chosen_key", "rejected_key", "ipo", "beta"}.isdisjoint(data) else "dpo"


def apply_defaults(draft: Draft, data: dict[str, Any], pipeline: Pipeline) -> None:
    """Applies ROLL's overrides and defaults to `data`, and records both in `draft`."""
    if pipeline == "distillation":
        draft.defaults |= fill_defaults(data, _defaults_of_distillation(data))
        return
    _override_models(draft, data, pipeline)
    for role in ("actor_train", "sft_train", "critic"):
        arguments = section_at(data, role, "training_args")
        if arguments.pop("max_steps", None) is not None:
            why = "the schedule spans all optimizer steps, as in ROLL, whose code computes it"
            draft.leave_out(f"{role}.training_args.max_steps", "idle", why)
    if pipeline in ("rlvr", "agentic"):
        _override_policy(draft, data, pipeline)
    draft.defaults |= fill_defaults(data, _defaults_of(data, pipeline))


def _defaults_of(data: Mapping[str, Any], pipeline: Pipeline) -> dict[str, Any]:
    """ROLL's defaults that can differ from ours, by dotted key, for the sections that `data` has."""
    trained = "sft_train" if pipeline == "sft" else "actor_train"
    found = ROLL.defaults("job", *(("policy",) if pipeline in ("rlvr", "agentic") else ()))
    found |= {f"{trained}.{key}": value for key, value in _TRAINED.items()}
    if pipeline == "dpo":  # `roll._preferences` doubles it
        found |= {f"{role}.infer_batch_size": 16 for role in ("actor_train", "reference") if role in data}
    if pipeline in ("rlvr", "agentic"):
        found |= {f"actor_infer.generating_args.{key}": value for key, value in _SAMPLED.items()}
        found[f"{trained}.data_args.response"] = "solution"
        sampled = section_at(data, "actor_infer", "generating_args").get("temperature", _SAMPLED["temperature"])
        if sampled != _LOGPROB_TEMPERATURE:
            found["actor_train.logprob_temperature"] = _LOGPROB_TEMPERATURE
        if isinstance(section_at(data, "validation").get("generating_args"), dict):
            found |= {f"validation.generating_args.{key}": value for key, value in _SAMPLED.items()}
    if data.get("adv_estimator", found.get("adv_estimator")) == GAE and isinstance(data.get("critic"), dict):
        found |= {f"critic.{key}": value for key, value in _TRAINED.items()}
        if isinstance(data.get("reward_pretrain"), str):
            found["critic.model_args.model_name_or_path"] = data["reward_pretrain"]
    dtype = section_at(data, trained, "model_args").get("dtype", _TRAINED["model_args.dtype"])
    for role in _ROLES:
        section = section_at(data, role)
        if isinstance(section.get("strategy_args"), dict):
            found[f"{role}.strategy_args.strategy_name"] = _UNNAMED_STRATEGY
        if section.get("use_sequence_packing"):
            found[f"{role}.sequence_packing_args.algorithm"] = "none"
        if role in data and role != trained and dtype != _TRAINED["model_args.dtype"]:
            found[f"{role}.model_args.dtype"] = _TRAINED["model_args.dtype"]
    return found


def _defaults_of_distillation(data: Mapping[str, Any]) -> dict[str, Any]:
    """ROLL's defaults of distillation over given texts."""
    found = {
        **ROLL.defaults("job"),
        "distill_loss_weight": 0.5,
        **{f"student.{key}": value for key, value in _TRAINED.items()},
    }
    for role in ("student", "teacher"):
        section = section_at(data, role)
        if isinstance(section.get("strategy_args"), dict):
            found[f"{role}.strategy_args.strategy_name"] = _UNNAMED_STRATEGY
        if section.get("use_sequence_packing"):
            found[f"{role}.sequence_packing_args.algorithm"] = "none"
    return found


def _override_models(draft: Draft, data: dict[str, Any], pipeline: Pipeline) -> None:
    """Removes the models of the roles, so that `pretrain` counts, unless every role names one. In SFT always."""
    path = ("model_args", "model_name_or_path")
    needed = {"rlvr": _ROLES[:3], "agentic": _ROLES[:3], "dpo": ("actor_train", "reference")}.get(pipeline, ())
    named = [section_at(data, role, path[0]).get(path[1]) for role in needed]
    if data.get("pretrain") is None or (named and all(named)):
        return
    for role in needed or ("sft_train",):
        model = section_at(data, role, path[0]).pop(path[1], None)
        if model not in (None, data["pretrain"]):
            why = f"{_CODE} to pretrain, {data['pretrain']}"
            draft.leave_out(dotted((role, *path)), "idle", f"{why}, unless all roles name a model" if needed else why)


def _override_policy(draft: Draft, data: dict[str, Any], pipeline: Pipeline) -> None:
    """Applies the values of RL files that ROLL's code sets: the norm under grpo, group size and lengths."""
    if data.get("adv_estimator") == "grpo" and data.get("norm_std_type") in ("batch", "running"):
        _replace(draft, data, ("norm_std_type",), "group", "to group under grpo")
    if pipeline != "rlvr":
        return
    sampled = section_at(data, "actor_infer", "generating_args")
    group = data.get("num_return_sequences_in_group", 1)
    if sampled.get("num_return_sequences", group) != group:
        _replace(
            draft,
            data,
            ("actor_infer", "generating_args", "num_return_sequences"),
            group,
            "to the group's size, num_return_sequences_in_group",
        )
    answer = _response_length(draft, data)
    validation = section_at(data, "validation", "generating_args")
    longest, prompt = data.pop("val_sequence_length", None), data.pop("val_prompt_length", None)
    if _is_count(longest) and _is_count(prompt) and longest > prompt and validation:
        draft.origins["validation", "generating_args", "max_new_tokens"] = "val_sequence_length"
        _replace(
            draft, data, ("validation", "generating_args", "max_new_tokens"), longest - prompt, "to the difference"
        )
        draft.leave_out("val_prompt_length", "idle", "the limit of held-out prompts is prompt_length, as in ROLL")
    elif answer is not None and validation.get("max_new_tokens", answer) != answer:
        _replace(draft, data, ("validation", "generating_args", "max_new_tokens"), answer, _DIFFERENCE)


_DIFFERENCE = "to sequence_length - prompt_length"


def _response_length(draft: Draft, data: dict[str, Any]) -> int | None:
    """Overrides both limits of a response as ROLL's code does; returns the limit, None if the file has none.

    `sequence_length` counts first, then `response_length`.
    """
    prompt: Any = data.get("prompt_length", 1024)
    total: Any = data.get("sequence_length")
    response: Any = data.get("response_length")
    if not _is_count(prompt) or not _is_count(response if total is None else total):
        return None
    answer: int = response if total is None else total - prompt
    if answer < 1:  # the loader reports it with the line
        return None
    if _is_count(response) and answer != response:
        _replace(draft, data, ("response_length",), answer, _DIFFERENCE)
    if section_at(data, "actor_infer", "generating_args").get("max_new_tokens", answer) != answer:
        text = "to response_length" if total is None else _DIFFERENCE
        _replace(draft, data, ("actor_infer", "generating_args", "max_new_tokens"), answer, text)
    return answer


def _replace(draft: Draft, data: dict[str, Any], path: tuple[str, ...], value: Any, text: str) -> None:
    """Sets the value at `path` and notes that ROLL's code does. `text`: what it is set to, for the note."""
    section = section_at(data, *path[:-1])
    written = f", whatever the file says ({section[path[-1]]})" if path[-1] in section else ""
    section[path[-1]] = value
    draft.meanings[path] = f"{_CODE} {text}{written}"


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
