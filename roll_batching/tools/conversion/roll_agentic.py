"""Translates the counts of ROLL's agentic files, and how they compare rewards.

`rollout_batch_size` counts trajectories, in groups of `train_env_manager.group_size` with the same start
(`roll/pipeline/agentic/agentic_config.py:331`); `num_return_sequences_in_group` is not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roll_batching.tools.conversion.draft import Draft

_NORMS = {"mean": ("group", None), "mean_std": ("group", "group"), "asym_clip": ("group", "group")}
"""(Scope of the mean, of the deviation) by `method`, if `grouping` is not batch; no scopes for other methods."""


def convert_agentic(draft: Draft, data: dict[str, Any], manager: Mapping[str, Any]) -> None:
    """Converts groups and normalisation of `data`. `manager`: the section `train_env_manager`."""
    _groups(draft, data, manager.get("group_size", 1))
    _normalisation(draft, data, manager.get("tags"))
    if data.get("adv_estimator") == "step_reinforce" and (discount := data.pop("step_reward_gamma", 0.95)) != 1:
        why = f"{discount}: ROLL discounts the rewards of turns by it; the rollout_function returns discounted ones"
        draft.leave_out("step_reward_gamma", "refused", why)


def _groups(draft: Draft, data: dict[str, Any], size: Any) -> None:
    """Converts `rollout_batch_size` from trajectories to groups of `size` trajectories."""
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        draft.leave_out(
            "train_env_manager.group_size", "refused", f"{size!r} is no number of trajectories: write 1 or more"
        )
        return
    if data.pop("num_return_sequences_in_group", None) is not None:
        why = "ROLL's agentic pipeline reads train_env_manager.group_size"
        draft.leave_out("num_return_sequences_in_group", "idle", why)
    draft.origins["num_return_sequences_in_group",] = "train_env_manager.group_size"
    data["num_return_sequences_in_group"] = size
    trajectories = data.get("rollout_batch_size")
    if size == 1 or not isinstance(trajectories, int):
        return
    if trajectories % size:
        why = f"{trajectories} trajectories are not groups of train_env_manager.group_size, {size}, which ROLL asserts"
        draft.leave_out("rollout_batch_size", "refused", why)
        del data["rollout_batch_size"]
        return
    data["rollout_batch_size"] = trajectories // size
    draft.meanings["rollout_batch_size",] = f"counts groups: {trajectories} trajectories in groups of {size}"


def _normalisation(draft: Draft, data: dict[str, Any], tags: Any) -> None:
    """Converts `reward_normalization`, the only section with which ROLL's agentic pipeline compares rewards.

    `tags`: the tags of its environments.
    """
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
