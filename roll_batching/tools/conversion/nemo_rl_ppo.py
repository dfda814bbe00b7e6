"""NeMo-RL's PPO files: the section `ppo`, which is read as `grpo`, and the value model as our critic."""

from __future__ import annotations

from typing import Any

from roll_batching.tools.conversion.critics import HEAD, put_critic, scale_loss
from roll_batching.tools.conversion.draft import Draft
from roll_batching.tools.conversion.foreign_file import ForeignFile
from roll_batching.tools.conversion.nemo_rl_file import NEMO_RL

_OWN_NAMES = (("grpo.async_grpo", "ppo.async_ppo"), ("grpo", "ppo"))
"""Sections under whose names PPO's are translated, each with PPO's name."""
_LINEAR_LAYER = "NeMo-RL's Megatron: uniform between plus and minus 1 / sqrt(hidden size)"


def read_ppo_as_grpo(file: ForeignFile) -> bool:
    """Renames the section `ppo` to `grpo`, whose keys most of its keys are; returns whether there was one."""
    if not isinstance(file.peek("ppo"), dict):
        return False
    if file.take("grpo") is not None:
        file.draft.leave_out("grpo", "idle", "the file has the section `ppo`, which is converted")
    file.data["grpo"] = file.take("ppo")
    if (settings := file.take("grpo.async_ppo")) is not None:
        file.data["grpo"]["async_grpo"] = settings
    return True


def restore_names(draft: Draft) -> None:
    """Gives the keys of `draft` the names of PPO's sections again."""
    draft.origins = {path: _own_name(key) for path, key in draft.origins.items()}
    draft.left_out = {_own_name(key): entry for key, entry in draft.left_out.items()}


def _own_name(key: str) -> str:
    for alias, name in _OWN_NAMES:
        if key == alias or key.startswith(f"{alias}."):
            return name + key.removeprefix(alias)
    return key


def convert_ppo(file: ForeignFile) -> None:
    """Converts the keys of `ppo` that `grpo` does not have, and the critic's loss."""
    passes = file.take("grpo.ppo_epochs")
    for ours in ("ppo_epochs", "critic_epochs"):
        if passes is not None:
            file.draft.put((ours,), passes, "grpo.ppo_epochs")
    file.move("grpo.policy_training_start_step", ("critic_warmup",))
    _estimator(file)
    if (clip := file.take("value_loss_fn.cliprange")) is not None and clip > 0:
        file.draft.put(("value_clip",), clip, "value_loss_fn.cliprange")
    elif clip is not None:
        file.draft.leave_out("value_loss_fn.cliprange", "idle", f"{clip}: NeMo-RL clips no values, as without the key")
    if file.draft.values.get("loss_agg_mode", "token-mean") != "token-mean":
        text = "NeMo-RL averages the critic's loss over tokens; here loss_agg_mode holds for both losses"
        file.draft.leave_out("value_loss_fn", "refused", text)
    for name in ("warmup_generation_lead_steps", "drop_incomplete_targets_on_restore"):
        if file.take(f"grpo.async_grpo.{name}"):
            text = "rollouts run ahead by async_generation_ratio throughout, and resume with their prompts"
            file.draft.leave_out(f"grpo.async_grpo.{name}", "idle", text)
    file.expect_off("loss_fn.positive_example_nll_weight", why="the loss has no term for correct samples alone")


def _estimator(file: ForeignFile) -> None:
    """Generalised advantage estimation; one lambda serves advantages and returns."""
    section = "grpo.adv_estimator"
    file.move(f"{section}.gae_gamma", ("gamma",))
    whole = file.take(f"{section}.gae_lambda")
    shares = [file.take(f"{section}.gae_lambda_{name}") for name in ("policy", "value")]
    policy, value = (whole if one is None else one for one in shares)
    if policy is not None:
        key = f"{section}.gae_lambda" if shares[0] is None else f"{section}.gae_lambda_policy"
        file.draft.put(("lambd",), policy, key)
    if value != policy:
        text = f"{value}, but one lambda, {policy}, serves the policy's advantages and the critic's returns"
        file.draft.leave_out(f"{section}.gae_lambda_value", "refused", text)
    why = "one lambda serves responses of all lengths"
    file.expect_off(f"{section}.length_adaptive_alpha", why=why)
    file.move(f"{section}.normalize_advantages", ("whiten_advantages",))


def value_as_policy(file: ForeignFile) -> ForeignFile:
    """The section `value` as the section `policy` of a file, whose keys it has."""
    value = file.take("value") or {}
    below = ForeignFile(NEMO_RL, {"policy": value}, Draft(file.draft.source, framework=file.draft.framework))
    longest = "policy.max_total_sequence_length"
    if below.peek(longest) == file.peek(longest):
        below.take(longest)
    below.take("policy.reward_model_cfg")
    return below


def put_value_model(file: ForeignFile, below: ForeignFile, megatron: bool) -> None:
    """Puts the translated value model into the role `critic`."""
    scale = file.take("value_loss_fn.scale")
    if isinstance(scale, int | float) and not isinstance(scale, bool):
        scale_loss(below.draft, ("actor_train", "training_args"), scale, "value_loss_fn.scale")
    put_critic(file.draft, below.draft, lambda key: "value" + key.removeprefix("policy") if _is_policy(key) else key)
    std, text = (0.01, _LINEAR_LAYER) if megatron else (0.02, "")
    file.draft.put(HEAD, std, "the start of the value head in NeMo-RL", text)
    file.draft.defaults.add("the start of the value head in NeMo-RL")


def _is_policy(key: Any) -> bool:
    return str(key) == "policy" or str(key).startswith("policy.")
