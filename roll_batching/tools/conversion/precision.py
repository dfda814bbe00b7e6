"""The precision of weights and the loss scale of fp16, as other frameworks write them."""

from __future__ import annotations

from typing import Any

from roll_batching.settings.training import LOSS_SCALE_KEYS
from roll_batching.tools.conversion.draft import Draft
from roll_batching.tools.conversion.foreign_file import ROLE, TRAIN, ForeignFile, section_at
from roll_batching.tools.conversion.slime_command import SLIME

_DTYPE = (ROLE, "model_args", "dtype")
_VERL_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_VERL_MEGATRON: dict[str, float] = {"initial_loss_scale": 2.0**15}
_VERL_FSDP: dict[str, float] = {"initial_loss_scale": 2.0**16, "loss_scale_window": 400, "hysteresis": 1}
"""Loss scales of verl's engines in fp16 (`init_megatron_optim_config`; torch's ShardedGradScaler), beside defaults that
are ours, too."""
_MEGATRON_INITIAL = 2.0**32
_ROLL_TRAINED = ("actor_train", "critic", "sft_train", "student")


def convert_slime_precision(file: ForeignFile) -> None:
    """Converts `--fp16` and the options of its loss scale; without it slime trains in bf16."""
    options = {f"--{name.replace('_', '-')}": (*TRAIN, name) for name in LOSS_SCALE_KEYS}
    if file.take("--fp16"):
        file.put(_DTYPE, "fp16", "--fp16")
        file.fill_defaults(SLIME.defaults("fp16"))
        for option, path in options.items():
            file.move(option, path)
        return
    key = "bf16, in which slime trains unless it has --fp16"
    file.put(_DTYPE, "bf16", key)
    file.draft.defaults.add(key)
    for option in options:
        file.leave_out(option, "idle", "bf16 has no loss scale here")


def convert_verl_precision(file: ForeignFile, section: str, optimizer: str, engine: str) -> None:
    """Converts `dtype` of the engine's `section`, and in fp16 the loss scale, which `optimizer` may override."""
    key = f"{section}.dtype"
    dtype = file.take(key) or "bfloat16"
    file.put(_DTYPE, _VERL_DTYPES.get(str(dtype), dtype), key)
    file.draft.defaults.add(key)
    if dtype != "float16":
        return
    is_megatron = engine == "megatron"
    for name, value in (_VERL_MEGATRON if is_megatron else _VERL_FSDP).items():
        file.put((*TRAIN, name), value, key, "verl's loss scale in fp16")
    for name in LOSS_SCALE_KEYS if is_megatron else ():
        file.move(f"{optimizer}.override_optimizer_config.{name}", (*TRAIN, name))


def convert_roll_precision(draft: Draft, data: dict[str, Any]) -> None:
    """Converts `training_args.fp16` of each role, which ROLL derives from `dtype`; sets the loss scale of fp16."""
    for role in [name for name, section in data.items() if isinstance(section, dict)]:
        training = section_at(data, role, "training_args")
        if training.pop("fp16", None) is True:
            model = data[role].setdefault("model_args", {})
            model["dtype"], draft.origins[role, "model_args", "dtype"] = "fp16", f"{role}.training_args.fp16"
        if role in _ROLL_TRAINED and section_at(data, role, "model_args").get("dtype") == "fp16":
            training = data[role].setdefault("training_args", {})
            training.setdefault("initial_loss_scale", _MEGATRON_INITIAL)
            path = (role, "training_args", "initial_loss_scale")
            draft.origins[path] = f"{role}.model_args.dtype"
            draft.meanings[path] = (
                "Megatron's default; the loss is multiplied by it, which ROLL's Megatron strategy leaves out"
            )
