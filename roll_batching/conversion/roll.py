"""ROLL's files: its roles and sections under our keys.

Most keys are ours already; what is here are the sections that lie elsewhere, and keys that mean something else.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from roll_batching.config.diagnostics import dotted
from roll_batching.config.key_paths import field_at
from roll_batching.config.roll_keys import DISTILLATION, VLM
from roll_batching.conversion.settle import Draft

AGENTIC = "agentic rollouts (environments, several turns) do not exist here"
REWARD_WORKERS = "no such reward exists here: write a function, and name it in reward_function or rewards"

_REWARDS: Mapping[str, tuple[str, str]] = {
    "MathRuleRewardWorker": ("math_verify", "compares the whole response; there, what follows its last </think>"),
    "CodeSandboxRewardWorker": ("code_tests", "stays off until reward_args.run says how code may be run"),
}
"""ROLL's reward workers that exist here, and what is different."""

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
    draft = Draft(source)
    environments = "custom_envs" in data or "train_env_manager" in data
    for key, why in _PIPELINES:
        if data.pop(key, None) is not None:
            draft.leave_out(key, "refused", why)
    supervised = data.pop("sft_train", None)
    pairs = {key: data.pop(key) for key in _OF_PAIRS if key in data} if "chosen_key" in data else None
    validation = data.pop("validation", None)
    _rewards(draft, data)
    if environments:  # whatever else there is speaks to them, under names that the environments choose
        for key in [key for key in data if field_at((key,)) is None]:
            del data[key]
            draft.leave_out(key, "refused", AGENTIC)
    _images(draft, data)
    draft.values = data
    if data.get("rewards") and "response" not in _section(data, "actor_train", "data_args"):
        text = "ROLL's reward workers compare with the column ground_truth"
        draft.put(("actor_train", "data_args", "response"), "ground_truth", "rewards", text)
    _mixture(draft)
    if isinstance(supervised, dict):
        _supervised(draft, supervised)
    if pairs is not None:
        _preferences(draft, pairs)
    if isinstance(validation, dict):
        _validation(draft, validation)
    _reference(draft)
    for role in ("actor_train", "actor_infer", "reference"):
        for path, meaning in _MEANINGS.items():
            draft.meanings.setdefault((role, *path), meaning)
    if "eval_file_name" not in _section(draft.values, "actor_train", "data_args"):
        text = "no held-out prompts are named: there is no evaluation"
        draft.put(("eval_samples",), 0, "validation.data_args.file_name", text)
    return draft


def _rewards(draft: Draft, data: dict[str, Any]) -> None:
    kept: dict[str, Any] = {}
    for section in ("rewards", "reward"):
        workers = data.pop(section, None)
        if not isinstance(workers, dict):
            continue
        named = {name: one for name, one in workers.items() if isinstance(one, dict) and "worker_cls" in one}
        for name, one in named.items():
            where = f"{section}.{name}"
            kind = str(one["worker_cls"]).rpartition(".")[2]
            if section == "rewards" and kind in _REWARDS:
                kept[name] = _reward(draft, name, one, *_REWARDS[kind])
            else:
                draft.leave_out(where, "refused", f"{kind}: {REWARD_WORKERS}")
        if not named:
            draft.leave_out(section, "refused", REWARD_WORKERS)

    if kept:
        data["rewards"] = kept


def _mixture(draft: Draft) -> None:
    """Which prompts are drawn: parts of domains, and what becomes of long ones."""
    texts = _section(draft.values, "actor_train", "data_args")
    shares, rewards = texts.get("domain_interleave_probs"), draft.values.get("rewards") or {}
    if not isinstance(shares, dict):
        return
    path = ("actor_train", "data_args", "domain_interleave_probs")
    here = {name: share for name, share in shares.items() if name in rewards}
    if not here:
        del texts["domain_interleave_probs"]
        why = "divides prompts by the domains of `rewards`, none of which is here: all are drawn alike"
        draft.leave_out(dotted(path), "refused", why)
    elif len(here) < len(shares) and all(isinstance(share, (int, float)) and share > 0 for share in here.values()):
        total = sum(here.values())  # what is no part is left to the loader, which says so
        meaning = f"parts of the domains that are here, over their sum; there, of {', '.join(shares)}"
        draft.put(path, {name: round(share / total, 4) for name, share in here.items()}, meaning=meaning)
    meaning = "as there, where those of 5 tokens or fewer are left out, too"
    draft.put(("actor_train", "data_args", "long_prompts"), "drop", "prompt_length", meaning)


def _reward(draft: Draft, name: str, worker: dict[str, Any], function: str, difference: str) -> dict[str, Any]:
    """The section of one reward that exists here."""
    here: dict[str, Any] = {"reward_function": function}
    draft.origins["rewards", name, "reward_function"] = f"rewards.{name}.worker_cls"
    draft.meanings["rewards", name, "reward_function"] = f"{function} {difference}"
    for key, value in worker.items():
        where = f"rewards.{name}.{key}"
        if key == "tag_included":
            here[key] = value
        elif key == "query_filter_config":
            draft.leave_out(
                where, "refused", "prompts are not drawn again by their rewards; difficulty_mask leaves them out"
            )
        elif key != "worker_cls":
            draft.leave_out(where, "idle", "rewards run in processes of their own, reward_workers of them")
    return here


def _images(draft: Draft, data: dict[str, Any]) -> None:
    """What prompts with images, videos and sound bring along."""
    for role in ("actor_train", "actor_infer", "reference"):
        texts = _section(data, role, "data_args")
        for key in [key for key in texts if str(key).startswith(("image_", "video_", "audio_"))]:
            del texts[key]
            draft.leave_out(f"{role}.data_args.{key}", "refused", VLM)


def _supervised(draft: Draft, role: dict[str, Any]) -> None:
    """The role `sft_train` as actor_train of `task: sft`."""
    draft.put(("task",), "sft", "sft_train")
    epochs = _section(role, "training_args").pop("num_train_epochs", 1)
    draft.values.pop("max_steps", None)
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
    arguments = _section(draft.values, "actor_train", "training_args")
    rows = arguments.get("per_device_train_batch_size")
    if isinstance(rows, int):
        meaning = "counts sequences, two of each pair; there, it counts pairs"
        path = ("actor_train", "training_args", "per_device_train_batch_size")
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
    strategy = _section(draft.values, "reference", "strategy_args")
    name = strategy.get("strategy_name")
    if isinstance(name, str) and not name.startswith("megatron"):
        strategy.pop("strategy_config", None)
        meaning = f"the reference runs on Megatron, in actor_train's layout; there, it is {name}"
        draft.put(("reference", "strategy_args", "strategy_name"), "megatron_infer", meaning=meaning)


def _section(data: dict[str, Any], *path: str) -> dict[str, Any]:
    """The section at `path`, or an empty one that belongs to nothing."""
    here: Any = data
    for part in path:
        here = here.get(part) if isinstance(here, dict) else None
    return here if isinstance(here, dict) else {}
