"""Writes the critic of another framework's file as our role `critic`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from roll_batching.jobs.config.layout_rules import PARALLEL_KEYS
from roll_batching.tools.conversion.draft import Draft
from roll_batching.tools.conversion.foreign_file import Given

ROLE = "critic"
HEAD = (ROLE, "model_args", "value_head_std")
_PLAIN = {"max_grad_norm": 1.0, "adam_epsilon": 1e-8}
"""Our defaults of the optimizer's keys that depend on the scale of the gradient."""


@dataclass(frozen=True)
class Critic:
    """A critic of another framework's file, converted as if it were an actor."""

    draft: Draft
    """Its settings, under `actor_train`."""
    head_std: Given
    """Standard deviation of the value head's first weights."""
    name: Callable[[str], str] = str
    """Converts a key of `draft`, which is named as an actor's, to the critic's key in the file."""
    value_clip: Given | None = None
    epochs: Given | None = None
    warmup: Given | None = None
    """RL steps in which only the critic trains."""
    lambd: Given | None = None


def write_critic(critic: Critic, draft: Draft) -> None:
    """Puts `critic` into `draft`, the draft of the whole job, which already has the policy."""
    put_critic(draft, critic.draft, critic.name)
    draft.defaults.add(critic.head_std.key)
    values = {HEAD: critic.head_std, ("value_clip",): critic.value_clip, ("critic_epochs",): critic.epochs}
    for path, given in (values | {("critic_warmup",): critic.warmup, ("lambd",): critic.lambd}).items():
        if given is not None:
            draft.put(path, given.value, given.key, given.meaning)


def share_layout(draft: Draft, below: Draft) -> None:
    """Gives the critic, translated in `below` as actor_train, the policy's devices and parallel sizes.

    The critic's results do not depend on them.
    """
    critic_role, policy_role = (part.values.setdefault("actor_train", {}) for part in (below, draft))
    layout = critic_role.setdefault("strategy_args", {}).setdefault("strategy_config", {})
    policy = policy_role.get("strategy_args", {}).get("strategy_config", {})
    for name in PARALLEL_KEYS:
        size, shared = layout.pop(name, None), policy.get(name)
        # 1 and False are the defaults of a policy without the key: nothing changes.
        if size is not None and size != shared and not (size in (1, False) and shared is None):
            path = ("actor_train", "strategy_args", "strategy_config", name)
            why = "the critic has the policy's parallel sizes, which change speed and memory, not results"
            below.leave_out(below.origins.get(path, name), "idle", why)
        if shared is not None:
            layout[name] = shared


def put_critic(draft: Draft, below: Draft, name: Callable[[str], str]) -> None:
    """Puts the section `actor_train` of `below` into the role `critic` of `draft`, with all reports on its keys.

    `name` converts a key of `below` to the critic's key in the file. A model is written only if it differs from the
    policy's: without one, the critic starts from the policy's weights. Devices and parallel sizes are the policy's.
    """
    values, train = below.values, below.values.get("actor_train", {})
    train.pop("device_mapping", None)
    layout = train.get("strategy_args", {}).get("strategy_config", {})
    for key in PARALLEL_KEYS:
        layout.pop(key, None)
    policy = draft.values.get("actor_train", {}).get("strategy_args", {}).get("strategy_config", {})
    if policy.get("recompute_granularity") is not None:  # a role without the key takes actor_train's
        layout.setdefault("recompute_granularity", None)
    if not layout:
        train.pop("strategy_args", None)
    draft.put((ROLE,), train)
    for path, key in below.origins.items():
        if path[0] == "actor_train":
            draft.origins[(ROLE, *path[1:])] = name(key)
    for path, text in below.meanings.items():
        if path[0] == "actor_train":
            draft.meanings[(ROLE, *path[1:])] = text
    model = values.get("pretrain")
    if model is not None and model != draft.values.get("pretrain"):
        draft.put((ROLE, "model_args", "model_name_or_path"), model, name(below.origins[("pretrain",)]))
    for key, (kind, why) in below.left_out.items():
        draft.leave_out(name(key), kind, why)
    draft.defaults |= {name(key) for key in below.defaults}
    draft.missing += [name(text).replace("actor_train.", f"{ROLE}.", 1) for text in below.missing]


def scale_loss(draft: Draft, training: tuple[str, ...], scale: float, key: str) -> None:
    """Divides the gradient-norm limit and epsilon of the optimizer at `training` by `scale`, a factor of the loss.

    Nothing else in a step of AdamW depends on the scale of the gradient: with both divided, the steps are those of the
    loss times `scale`.
    """
    if scale <= 0:
        draft.leave_out(key, "refused", f"is {scale}: the critic would not learn; set a scale above 0")
        return
    if scale == 1:
        return
    section: Any = draft.values
    for part in training:
        section = section.setdefault(part, {})
    for name, plain in _PLAIN.items():
        meaning = f"divided by {key}, {scale}, which the critic's loss does not have here: the steps are the same"
        value = float(f"{section.get(name, plain) / scale:.12g}")  # 12 digits: no rounding error in the YAML
        draft.put((*training, name), value, draft.origins.get((*training, name), key), meaning)
