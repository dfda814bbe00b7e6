"""Optimizers in files of other frameworks: AdamW, and Megatron's Muon, whose keys have Megatron's names everywhere."""

from __future__ import annotations

from collections.abc import Callable

from roll_batching.settings import TrainingArgs
from roll_batching.tools.conversion.foreign_file import LAYOUT, TRAIN, ForeignFile

_ADAM = ("adam", "adamw", "fusedadam")
_MUON = {name: name for name in TrainingArgs.model_fields if name.startswith("muon_")}
_MUON["muon_use_nesterov"] = "muon_nesterov"  # in Megatron-Core 0.16
"""Our keys of Muon by Megatron's."""


def convert_optimizer(file: ForeignFile, key: str, *, megatron: bool = True) -> bool:
    """Converts the optimizer that `key` names; returns whether it is Muon.

    `megatron`: whether Megatron trains there, which alone has this Muon.
    """
    name = str(file.take(key) or "adam")
    is_muon = megatron and name in ("muon", "dist_muon")
    if is_muon:
        file.draft.put((*TRAIN, "optimizer"), "muon", key)
    elif name.rpartition(".")[2].lower() not in _ADAM:
        file.draft.leave_out(key, "refused", f"{name}: parameters are trained by AdamW, or by Megatron's Muon")
    if is_muon and name == "dist_muon":
        file.draft.put((*LAYOUT, "use_distributed_optimizer"), True, key, "Megatron's layer-wise optimizer")
    return is_muon


def convert_muon_keys(file: ForeignFile, key_of: Callable[[str], str]) -> None:
    """Converts Muon's keys, by the file's key for each of Megatron's names."""
    for theirs, ours in _MUON.items():
        file.move(key_of(theirs), (*TRAIN, ours))
    if (other := file.take(key := key_of("muon_scalar_optimizer"))) not in (None, "adam"):
        file.draft.leave_out(key, "refused", f"{other}: AdamW trains the parameters that are no matrices")
