"""ROLL's agentic files: trajectories counted by group, and rewards normalised by `reward_normalization`.

`rollout_batch_size` counts trajectories, in groups of `train_env_manager.group_size` with the same start
(`roll/pipeline/agentic/agentic_config.py:331`); `num_return_sequences_in_group` is not read.
"""

from __future__ import annotations

from typing import Any

from roll_batching.tools.conversion.draft import Draft

AGENTIC = "environments and turns are written as a rollout_function (docs/rollouts.md)"
_MANAGERS = ("custom_envs", "train_env_manager", "val_env_manager", "env_manager_cls")
_NORMS = {"mean": ("group", None), "mean_std": ("group", "group"), "asym_clip": ("group", "group")}
"""By `method`, the scopes of mean and deviation unless `grouping` is batch; none for other methods."""


def convert_agentic(draft: Draft, data: dict[str, Any]) -> None:
    """Converts groups and normalisation of `data`, and leaves out environments."""
    manager = data.get("train_env_manager")
    manager = manager if isinstance(manager, dict) else {}
    _groups(draft, data, manager.get("group_size", 1))
    _normalisation(draft, data, manager.get("tags"))
    if data.get("adv_estimator") == "step_reinforce" and (discount := data.pop("step_reward_gamma", 0.95)) != 1:
        text = f"{discount}: ROLL discounts the rewards of turns by it; the rollout_function returns discounted ones"
        draft.leave_out("step_reward_gamma", "refused", text)
    for key in _MANAGERS:
        if data.pop(key, None) is not None:
            draft.leave_out(key, "refused", AGENTIC)
    text = "rollout_function: is missing: write the environments of custom_envs as one, which also returns rewards"
    draft.missing.append(f"{text} (docs/rollouts.md)")


def _groups(draft: Draft, data: dict[str, Any], size: Any) -> None:
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        draft.leave_out("train_env_manager.group_size", "refused", f"{size!r} is no number of trajectories")
        return
    if data.pop("num_return_sequences_in_group", None) is not None:
        text = "ROLL's agentic pipeline reads train_env_manager.group_size"
        draft.leave_out("num_return_sequences_in_group", "idle", text)
    draft.origins["num_return_sequences_in_group",] = "train_env_manager.group_size"
    data["num_return_sequences_in_group"] = size
    trajectories = data.get("rollout_batch_size")
    if size == 1 or not isinstance(trajectories, int):
        return
    if trajectories % size:
        text = f"{trajectories} trajectories are not groups of train_env_manager.group_size, {size}, which ROLL asserts"
        draft.leave_out("rollout_batch_size", "refused", text)
        del data["rollout_batch_size"]
        return
    data["rollout_batch_size"] = trajectories // size
    draft.meanings["rollout_batch_size",] = f"counts groups: {trajectories} trajectories in groups of {size}"


def _normalisation(draft: Draft, data: dict[str, Any], tags: Any) -> None:
    """Writes `reward_normalization`, which alone says how rewards are compared in ROLL's agentic pipeline."""
    section = data.pop("reward_normalization", None) or {}
    if not isinstance(section, dict):
        draft.leave_out("reward_normalization", "refused", f"{section!r} is no section of keys and values")
        section = {}
    for unread in ("norm_mean_type", "norm_std_type"):
        if data.pop(unread, None) is not None:
            draft.leave_out(unread, "idle", "ROLL's agentic pipeline reads reward_normalization")
    grouping, method = str(section.get("grouping", "batch")), str(section.get("method", "identity"))
    mean, std = _NORMS.get(method, (None, None))
    if grouping == "batch":
        mean, std = mean and "batch", std and "batch"
    mean, std = section.get("norm_mean_type") or mean, section.get("norm_std_type") or std
    for unread in ("global_scale_factor", "global_shift_value"):
        if section.get(unread) is not None:
            draft.leave_out(f"reward_normalization.{unread}", "idle", "ROLL's code does not read it")
    text = ""
    if "group" in (mean, std) and grouping != "traj_group_id":  # tags of environments: as one domain of rewards
        mean, std = (scope and "batch" for scope in (mean, std))
        if grouping != "batch" and not (isinstance(tags, list) and len(set(map(str, tags))) == 1):
            text = f"over all samples; ROLL: over those with the same {grouping}"
    key, name = "reward_normalization.method", data.get("adv_estimator")
    if name in ("grpo", "reinforce") and (mean, std) == ("group", "group"):
        draft.put(("adv_estimator",), "grpo", key)
        data["adv_estimator"] = "grpo"
        return
    if name == "grpo":
        data["adv_estimator"] = "reinforce"
        draft.meanings["adv_estimator",] = f"grpo in ROLL's agentic pipeline compares as {key} says, {method}"
    for ours, scope in (("norm_mean_type", mean), ("norm_std_type", std)):
        if scope is not None and not (name == "gigpo" and ours == "norm_mean_type"):
            data[ours], draft.origins[(ours,)] = scope, key
            if text:
                draft.meanings[(ours,)] = text
