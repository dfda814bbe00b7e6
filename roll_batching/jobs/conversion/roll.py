"""ROLL's files: its roles and sections under our keys.

Most keys are ours already; what is here are the sections that lie elsewhere, and keys that mean something else.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from roll_batching.jobs.config.diagnostics import dotted
from roll_batching.jobs.config.foreign_keys import DISTILLATION, FOREIGN_KEYS, VLM
from roll_batching.jobs.config.job_keys import JobKeys
from roll_batching.jobs.config.key_paths import field_at
from roll_batching.jobs.conversion.draft import Draft
from roll_batching.jobs.conversion.framework_defaults import section_at
from roll_batching.jobs.conversion.roll_defaults import apply_defaults, pipeline_of
from roll_batching.jobs.conversion.roll_rewards import REWARD_WORKERS, divide_prompts, translate_rewards

AGENTIC = "agentic rollouts (environments, several turns) do not exist here"

_PIPELINES: tuple[tuple[str, str], ...] = (
    ("custom_envs", AGENTIC),
    ("train_env_manager", AGENTIC),
    ("val_env_manager", AGENTIC),
    ("env_manager_cls", AGENTIC),
    ("reward_normalization", "agentic rewards per turn do not exist here; norm_mean_type and norm_std_type shape ours"),
    ("student", DISTILLATION),
    ("teacher", DISTILLATION),
    ("student_train", DISTILLATION),
    ("student_infer", DISTILLATION),
    ("teacher_pretrain", DISTILLATION),
    ("reward_model", REWARD_WORKERS),
)
_OF_PAIRS = ("chosen_key", "rejected_key", "beta", "ipo", "label_smoothing")
"""Sections and keys of pipelines that do not exist here, which stand for a part of what is trained."""

_MEANINGS: Mapping[tuple[str, ...], str] = {
    ("strategy_args", "strategy_config", "attention_backend"): (
        "names our attention core; there, one of TransformerEngine's kernels"
    ),
    ("training_args", "gradient_accumulation_steps"): (
        "a mini-batch is per_device_train_batch_size x this x data-parallel ranks sequences, drawn over all ranks; "
        "there, it is drawn inside each rank"
    ),
    ("sequence_packing_args", "max_packed_sequence_length_train"): "a hard cap of every pack; there, of their mean",
    ("sequence_packing_args", "max_packed_sequence_length_forward"): "a hard cap of every pack; there, of their mean",
}
"""By key of a role: what it means here."""


def draft_of_roll(source: str, data: dict[str, Any]) -> Draft:
    """ROLL's composed settings in our names."""
    data = copy.deepcopy(data)
    draft = Draft(source, framework="ROLL")
    pipeline = pipeline_of(data)
    apply_defaults(draft, data, pipeline)
    if isinstance(kept := data.pop("max_ckpt_to_keep", None), int) and kept > 0:
        data["save_total_limit"], draft.origins["save_total_limit",] = kept, "max_ckpt_to_keep"
    for key, why in _PIPELINES:
        if data.pop(key, None) is not None:
            draft.leave_out(key, "refused", why)
    supervised = data.pop("sft_train", None)
    pairs = {key: data.pop(key) for key in _OF_PAIRS if key in data}
    validation = data.pop("validation", None)
    translate_rewards(draft, data)
    if pipeline == "agentic":  # unknown keys are settings of environments, which choose their names
        for key in [key for key in data if field_at((key,)) is None and key not in FOREIGN_KEYS[JobKeys]]:
            del data[key]
            draft.leave_out(key, "refused", AGENTIC)
    _images(draft, data)
    draft.values = data
    if data.get("rewards") and "actor_train.data_args.response" in draft.defaults:
        text = "ROLL's reward workers compare with the column ground_truth"
        draft.put(("actor_train", "data_args", "response"), "ground_truth", "rewards", text)
    divide_prompts(draft)
    _policy_gradient(draft)
    if isinstance(supervised, dict):
        _supervised(draft, supervised)
    if pipeline == "dpo":
        _preferences(draft, pairs)
    if isinstance(validation, dict):
        _validation(draft, validation)
    _reference(draft)
    for role in ("actor_train", "actor_infer", "reference"):
        for path, meaning in _MEANINGS.items():
            draft.meanings.setdefault((role, *path), meaning)
    if "eval_file_name" not in section_at(draft.values, "actor_train", "data_args"):
        text = "no held-out prompts are named: there is no evaluation"
        draft.put(("eval_samples",), 0, "validation.data_args.file_name", text)
    return draft


_VARIANTS: Mapping[str, str] = {"ppo": "policy", "vanilla": "gpg", "topr": "topr", "cispo": "cispo"}
"""Variants of ROLL's ActorPGWorker that exist here, and their losses."""
_CISPO_RANGE = 0.1
"""Both of its `cispo_epsilon_*`, which are no fields of a role there."""


def _policy_gradient(draft: Draft) -> None:
    """`pg_variant` and its settings, which ROLL's ActorPGWorker reads, as a loss."""
    role = section_at(draft.values, "actor_train")
    weights = {name: role.pop(f"topr_{name}_weight", None) for name in ("positive", "negative")}
    variant = role.pop("pg_variant", None)
    if variant is None:
        return
    where = "actor_train.pg_variant"
    if "pg_worker" not in str(role.get("worker_cls")):
        draft.leave_out(where, "idle", "ROLL's ActorPGWorker alone reads it, and worker_cls names another")
        return
    if variant not in _VARIANTS:
        draft.leave_out(where, "refused", f"there is no such loss here; {', '.join(_VARIANTS)} are translated")
        return
    draft.put(("loss_function",), _VARIANTS[variant], where)
    if variant == "cispo":
        draft.put(("use_pg_clip_range",), True, where)
        for key in ("pg_clip_low", "pg_clip_high"):
            draft.put((key,), _CISPO_RANGE, where, "ROLL's cispo always clips here, whatever pg_clip says")
    for name, weight in weights.items():
        if variant == "topr" and weight is not None:
            draft.put(("loss_args", f"{name}_weight"), weight, f"actor_train.topr_{name}_weight")
    if draft.values.pop("importance_sampling", "token") != "token":
        draft.leave_out("importance_sampling", "idle", "ROLL's ActorPGWorker takes a ratio per token")


def _images(draft: Draft, data: dict[str, Any]) -> None:
    """What prompts with images, videos and sound bring along."""
    for role in ("actor_train", "actor_infer", "reference"):
        texts = section_at(data, role, "data_args")
        for key in [key for key in texts if str(key).startswith(("image_", "video_", "audio_"))]:
            del texts[key]
            draft.leave_out(f"{role}.data_args.{key}", "refused", VLM)


def _supervised(draft: Draft, role: dict[str, Any]) -> None:
    """The role `sft_train` as actor_train of `task: sft`."""
    draft.put(("task",), "sft", "sft_train")
    epochs = section_at(role, "training_args").pop("num_train_epochs", 1)
    if draft.values.pop("max_steps", None) is not None:
        draft.leave_out("max_steps", "idle", "ROLL's SFT does not read it: num_train_epochs rules")
    meaning = "the texts are shuffled anew in every one; there, they stay in their order"
    draft.put(("num_train_epochs",), epochs, "sft_train.training_args.num_train_epochs", meaning)
    for key, value in role.items():
        draft.put(("actor_train", key), value, f"sft_train.{key}")
        _moved_below(draft, ("actor_train", key), ("sft_train", key), value)
    _chat(draft, {"prompt": ("prompt_key", "instruction"), "response": ("response_key", "output")})
    for key, ours in (("query_key", "query"), ("system_key", "system")):
        if (name := draft.values.pop(key, None)) is not None:
            draft.put(("actor_train", "data_args", ours), name, key)
    text = "no more than these tokens: a longer text is an error that names it; there, it is cut off"
    draft.meanings["sequence_length",] = text


def _preferences(draft: Draft, given: dict[str, Any]) -> None:
    """The keys of a pipeline for pairs as `task: dpo`."""
    draft.put(("task",), "dpo", "chosen_key")
    draft.put(("loss_function",), "ipo" if given.get("ipo") else "dpo", "ipo")
    draft.put(("loss_args", "beta"), given.get("beta", 0.1), "beta")
    if given.get("label_smoothing") and not given.get("ipo"):
        draft.put(("loss_args", "label_smoothing"), given["label_smoothing"], "label_smoothing")
    _chat(draft, {"prompt": ("", "instruction")})
    for key in ("chosen", "rejected"):
        draft.put(("actor_train", "data_args", key), given.get(f"{key}_key", key), f"{key}_key")
    arguments = section_at(draft.values, "actor_train", "training_args")
    meaning = "counts sequences, two of each pair; there, it counts pairs"
    for path in (
        ("actor_train", "training_args", "per_device_train_batch_size"),
        ("actor_train", "infer_batch_size"),
        ("reference", "infer_batch_size"),
    ):
        rows = section_at(draft.values, *path[:-1]).get(path[-1])
        if rows is not None and (not isinstance(rows, int) or isinstance(rows, bool)):
            draft.leave_out(dotted(path), "refused", "is no whole number: two sequences stand here, one pair")
            rows = 1
        if rows is not None:
            draft.put(path, 2 * rows, dotted(path), meaning)
    arguments.pop("num_train_epochs", None)  # max_steps rules there
    text = "a pair with more tokens is an error that names it; there, it is left out"
    draft.meanings["sequence_length",] = text


def _chat(draft: Draft, keys: Mapping[str, tuple[str, str]]) -> None:
    """Texts under `keys` (ours: its key in the file, what it is by default) are turns of a chat, as in ROLL."""
    for ours, (key, default) in keys.items():
        draft.put(("actor_train", "data_args", ours), draft.values.pop(key, None) or default, key or "data_args")
    meaning = "texts go through the tokenizer's own chat template; there, through the one that `template` names"
    draft.put(("actor_train", "data_args", "chat"), True, "data_args.template", meaning)


def _moved_below(draft: Draft, ours: tuple[str, ...], theirs: tuple[str, ...], value: Any) -> None:
    """Notes where every key of a section came from."""
    if isinstance(value, dict):
        for key, below in value.items():
            draft.origins[(*ours, key)] = ".".join((*theirs, str(key)))
            _moved_below(draft, (*ours, key), (*theirs, str(key)), below)


def _validation(draft: Draft, role: dict[str, Any]) -> None:
    """The role `validation`: its file serves the evaluation."""
    texts = role.pop("data_args", None) or {}
    name = texts.pop("file_name", None)
    if name is not None:
        draft.put(("actor_train", "data_args", "eval_file_name"), name, "validation.data_args.file_name")
    for key in texts:
        draft.leave_out(f"validation.data_args.{key}", "idle", "held-out prompts are read as actor_train's are")
    if (sampling := role.pop("generating_args", None)) is not None and "task" not in draft.values:
        draft.put(("validation", "generating_args"), sampling)
    for key in role:
        draft.leave_out(f"validation.{key}", "idle", "the evaluation runs in the job's own processes")


def _reference(draft: Draft) -> None:
    """A reference on an engine or on Hugging Face's own model runs on Megatron here."""
    strategy = section_at(draft.values, "reference", "strategy_args")
    name = strategy.get("strategy_name")
    if isinstance(name, str) and not name.startswith("megatron"):
        strategy.pop("strategy_config", None)
        meaning = f"the reference runs on Megatron, in actor_train's layout; there, it is {name}"
        draft.put(("reference", "strategy_args", "strategy_name"), "megatron_infer", meaning=meaning)
