"""The critic of another framework's file as our role `critic`."""

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
"""Keys of the optimizer that depend on the gradient's scale, with our defaults."""


@dataclass(frozen=True)
class Critic:
    """A critic, whose settings are those of actor_train in a draft."""

    draft: Draft
    head_std: Given
    """Standard deviation of the value head's first weights."""
    name: Callable[[str], str] = str
    """The critic's name in the file of a key in the draft."""
    value_clip: Given | None = None
    epochs: Given | None = None
    warmup: Given | None = None
    """Steps before the policy is trained."""
    lambd: Given | None = None


def write_critic(critic: Critic, draft: Draft) -> None:
    """Puts `critic` into `draft`, which has the policy."""
    put_critic(draft, critic.draft, critic.name)
    draft.defaults.add(critic.head_std.key)
    values = {HEAD: critic.head_std, ("value_clip",): critic.value_clip, ("critic_epochs",): critic.epochs}
    for path, given in (values | {("critic_warmup",): critic.warmup, ("lambd",): critic.lambd}).items():
        if given is not None:
            draft.put(path, given.value, given.key, given.meaning)


def share_layout(draft: Draft, below: Draft) -> None:
    """Gives the critic, translated in `below` as actor_train, the policy's devices and parallel sizes.

    They leave its results as they are.
    """
    own, theirs = (one.values.setdefault("actor_train", {}) for one in (below, draft))
    layout = own.setdefault("strategy_args", {}).setdefault("strategy_config", {})
    policy = theirs.get("strategy_args", {}).get("strategy_config", {})
    for name in PARALLEL_KEYS:
        given, shared = layout.pop(name, None), policy.get(name)
        if given is not None and given != shared and not (given in (1, False) and shared is None):
            path = ("actor_train", "strategy_args", "strategy_config", name)
            why = "the critic has the policy's parallel sizes, which change speed and memory, not results"
            below.leave_out(below.origins.get(path, name), "idle", why)
        if shared is not None:
            layout[name] = shared


def put_critic(draft: Draft, below: Draft, name: Callable[[str], str]) -> None:
    """Puts what `below` has for actor_train into the role `critic` of `draft`; `name` gives a key's name in the file.

    The model is put where it is not the policy's: without it, the critic starts from the policy's weights. Devices and
    parallel sizes are the policy's.
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
    """Divides the clip range and epsilon of the optimizer at `training` by a loss's factor `scale`.

    AdamW's steps do not depend on the scale of the gradient otherwise: they are those of the loss times `scale`.
    """
    if scale <= 0:
        draft.leave_out(key, "refused", f"is {scale}: the critic would not learn")
        return
    if scale == 1:
        return
    section: Any = draft.values
    for part in training:
        section = section.setdefault(part, {})
    for name, plain in _PLAIN.items():
        meaning = f"divided by {key}, {scale}, which the critic's loss does not have here: the steps are the same"
        value = float(f"{section.get(name, plain) / scale:.12g}")
        draft.put((*training, name), value, draft.origins.get((*training, name), key), meaning)
