"""Translates LoRA settings of verl and NeMo-RL to `lora_target`, `lora_rank` and `lora_alpha`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from roll_batching.settings.adapters import ALL_LINEAR, LAYERS, PROJECTIONS
from roll_batching.tools.conversion.foreign_file import ForeignFile

_NAMES: Mapping[str, tuple[str, ...]] = {
    ALL_LINEAR: PROJECTIONS,
    **LAYERS,
    **{name: (name,) for name in PROJECTIONS},
    **{f"linear_{name}": (f"{name}_proj",) for name in "qkv"},
    **{f"linear_fc1_{name}": (f"{name}_proj",) for name in ("gate", "up")},
}
"""Projections by the names that PEFT, Megatron-Bridge and its canonical LoRA have for them."""
_MODEL = ("actor_train", "model_args")
_OWN_A = "queries, keys and values, and gate and up projection have a matrix A each; there they share one"


def convert_adapters(
    file: ForeignFile, section: str, *, rank: str, alpha: tuple[str, int], shares_a: bool, **names: str
) -> None:
    """Converts LoRA settings whose `rank` in `section` is above 0.

    Args:
        file: the file.
        section: the section of all keys.
        rank: key of the rank.
        alpha: key of the scale, and its default.
        shares_a: whether projections that Megatron fuses share a matrix A there.
        names: keys that are left out where they are on, with the reason.
    """
    file.move(f"{section}.{rank}", (*_MODEL, "lora_rank"))
    given = file.take(f"{section}.{alpha[0]}")
    file.draft.put((*_MODEL, "lora_alpha"), alpha[1] if given is None else given, f"{section}.{alpha[0]}")
    key = f"{section}.target_modules"
    wanted, unknown = _projections(file.take(key) or [ALL_LINEAR])
    dropped, unknown_excluded = _projections(file.take(f"{section}.exclude_modules") or ())
    target = [name for name in PROJECTIONS if name in wanted - dropped]
    if unknown or not target:
        text = f"{', '.join(unknown) or 'nothing'}: adapters are of {', '.join(PROJECTIONS)}; all of them are written"
        file.draft.leave_out(key, "refused", text)
        target = list(PROJECTIONS)
    if unknown_excluded:
        text = f"{', '.join(unknown_excluded)}: patterns are not read; name projections in lora_target"
        file.draft.leave_out(f"{section}.exclude_modules", "refused", text)
    value = ALL_LINEAR if len(target) == len(PROJECTIONS) else ",".join(target)
    file.draft.put((*_MODEL, "lora_target"), value, key, _OWN_A if shares_a else "")
    for name, why in names.items():
        file.expect_off(f"{section}.{name}", why=why)


def convert_verl_adapters(file: ForeignFile, model: str) -> None:
    """Converts verl's LoRA where it is on: of PEFT under FSDP, of Megatron-Bridge (section `lora`) under Megatron."""
    bridge = bool(file.peek(f"{model}.lora.rank"))
    if not bridge and not file.peek(f"{model}.lora_rank"):
        return
    if bridge:
        for name in ("lora_rank", "lora_alpha", "target_modules", "exclude_modules"):
            file.take(f"{model}.{name}")
    else:
        file.take(f"{model}.lora")
        file.move(f"{model}.lora_adapter_path", (*_MODEL, "adapter_name_or_path"))
    if not bridge:
        convert_adapters(file, model, rank="lora_rank", alpha=("lora_alpha", 16), shares_a=False)
        return
    section = f"{model}.lora"
    kind = file.take(f"{section}.type") or "lora"
    if kind not in ("lora", "canonical_lora"):
        file.draft.leave_out(f"{section}.type", "refused", f"{kind}: adapters are plain LoRA")
    for name in ("merge", "dropout_position", "lora_A_init_method", "lora_B_init_method", "a2a_experimental", "dtype"):
        file.take(f"{section}.{name}")  # engines get merged weights; without dropout: how the numbers are computed
    for name in ("freeze_vision_model", "freeze_vision_projection", "freeze_language_model"):
        file.take(f"{section}.{name}")
    why = "adapters have no dropout: the first ratio would differ from 1"
    path = "is a checkpoint of Megatron-Bridge; adapter_name_or_path takes a directory in PEFT's format"
    convert_adapters(
        file, section, rank="rank", alpha=("alpha", 32), shares_a=kind == "lora", dropout=why, adapter_path=path
    )


def _projections(given: Any) -> tuple[set[str], list[str]]:
    """Projections of a list of names, or of one text with commas, and the names that are none."""
    names: Iterable[Any] = given.split(",") if isinstance(given, str) else given
    found: set[str] = set()
    unknown = []
    for name in map(str, names):
        found.update(_NAMES.get(name.strip(), ()))
        if name.strip() not in _NAMES:
            unknown.append(name)
    return found, unknown
