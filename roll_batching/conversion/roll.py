"""ROLL's files: its roles and sections under our keys.

Most keys are ours already; what is here are the sections that lie elsewhere, and keys that mean something else.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from roll_batching.config.diagnostics import dotted
from roll_batching.config.fields import Refused, use_of
from roll_batching.config.key_paths import field_at
from roll_batching.config.roll_keys import DISTILLATION, VLM
from roll_batching.conversion.settle import Draft

AGENTIC = "agentic rollouts (environments, several turns) do not exist here"
PREFERENCES = "write a file with task: dpo; its pairs and loss: actor_train.data_args.chosen and rejected, loss_args"
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
    ("chosen_key", PREFERENCES),
    ("rejected_key", PREFERENCES),
    ("beta", PREFERENCES),
    ("ipo", PREFERENCES),
    ("label_smoothing", PREFERENCES),
)
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
    preferences = "chosen_key" in data
    environments = "custom_envs" in data or "train_env_manager" in data
    for key, why in _PIPELINES:
        if data.pop(key, None) is not None:
            draft.leave_out(key, "refused", why)
    supervised = data.pop("sft_train", None)
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
    if isinstance(validation, dict):
        _validation(draft, validation, supervised is not None or preferences)
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
    elif len(here) < len(shares):
        total = sum(here.values())
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
    """The role `sft_train` as the job's warm-up, with nothing after it."""
    texts = role.pop("data_args", None) or {}
    arguments = role.pop("training_args", None) or {}
    rows = arguments.get("per_device_train_batch_size")
    if rows is not None:  # shapes the planned passes of the role, too
        draft.put(("actor_train", "training_args", "per_device_train_batch_size"), rows)
    for key, value in arguments.items():
        path = ("num_train_epochs",) if key == "num_train_epochs" else ("training_args", key)
        draft.put(("warmup", *path), value, f"sft_train.training_args.{key}")
    for key, value in role.items():
        draft.put(("actor_train", key), value, f"sft_train.{key}")
        _moved_below(draft, ("actor_train", key), ("sft_train", key), value)
    for key, value in texts.items():
        if key in ("file_name", "messages"):
            draft.put(("warmup", key), value, f"sft_train.data_args.{key}")
        else:
            field = field_at(("actor_train", "data_args", key))
            refused = field is not None and isinstance(use_of(field), Refused)
            draft.leave_out(
                f"sft_train.data_args.{key}", "refused" if refused else "idle", "texts are read as they are"
            )
    for key, ours in (("prompt_key", "prompt"), ("response_key", "response")):
        if draft.values.get(key) is not None:
            draft.put(("warmup", ours), draft.values.pop(key), key)
    for key in ("query_key", "system_key"):
        if draft.values.pop(key, None) is not None:
            draft.leave_out(key, "refused", "one key holds the whole prompt: join the texts in the file")
    draft.values.pop("max_steps", None)
    draft.put(("max_steps",), 0, "sft_train", "supervised training is the section `warmup`; RL makes no step after it")


def _moved_below(draft: Draft, ours: tuple[str, ...], theirs: tuple[str, ...], value: Any) -> None:
    """Notes where every key of a section came from."""
    if isinstance(value, dict):
        for key, below in value.items():
            draft.origins[(*ours, key)] = ".".join((*theirs, str(key)))
            _moved_below(draft, (*ours, key), (*theirs, str(key)), below)


def _validation(draft: Draft, role: dict[str, Any], supervised: bool) -> None:
    """The role `validation`: its file serves the evaluation of rollouts."""
    texts = role.pop("data_args", None) or {}
    name = texts.pop("file_name", None)
    if name is not None and supervised:
        draft.leave_out(
            "validation.data_args.file_name", "refused", "a warm-up measures no held-out loss; task: sft does"
        )
    elif name is not None:
        draft.put(("actor_train", "data_args", "eval_file_name"), name, "validation.data_args.file_name")
    for key in texts:
        draft.leave_out(f"validation.data_args.{key}", "idle", "held-out prompts are read as actor_train's are")
    if role.pop("generating_args", None) is not None:
        why = "held-out prompts are answered as actor_infer.generating_args says"
        draft.leave_out("validation.generating_args", "refused", why)
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
