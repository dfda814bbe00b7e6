"""Settings of LoRA adapters and frozen modules, in ROLL's names."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import field_validator, model_validator

from roll_batching.errors import LayoutError
from roll_batching.settings.fields import TRAINED, AlsoInFile, Settings, setting

LAYERS = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
"""Hugging Face's projections in each of Megatron's linear layers, in the order of their rows."""
ALL_LINEAR = "all-linear"
PROJECTIONS = tuple(part for parts in LAYERS.values() for part in parts)
_OR_WITH_COMMAS = AlsoInFile(
    str, lambda value: tuple(part.strip() for part in value.split(",")) if isinstance(value, str) else value
)


class AdapterArgs(Settings):
    """Keys of `model_args` for training a part of the model."""

    lora_target: Annotated[tuple[str, ...] | None, _OR_WITH_COMMAS] = setting(
        None,
        help="Trains LoRA adapters of these projections and freezes the model (docs/fine-tuning.md): all-linear, or "
        "some of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj as a list or with commas; linear_qkv, "
        "linear_proj, linear_fc1 and linear_fc2 stand for those of a Megatron layer. Default: all parameters are "
        "trained.",
    )
    lora_rank: int = setting(8, help="Rank of the adapters.", ge=1, le=4096)
    lora_alpha: float | None = setting(
        None, help="Adapters are multiplied by lora_alpha / lora_rank; default: 2 x lora_rank.", gt=0
    )
    adapter_name_or_path: str | None = setting(
        None,
        help="Directory in PEFT's format (adapter_config.json, adapter_model.safetensors) from which adapters start. "
        "Its r, lora_alpha and projections must be those of the keys above. Default: new adapters.",
    )
    freeze_module_prefix: Annotated[tuple[str, ...] | None, _OR_WITH_COMMAS] = setting(
        None,
        help="Parameters whose names begin with one of these are not trained: Megatron's names "
        "(decoder.layers.0.mlp, embedding), with layers numbered over the whole model. A list, or with commas.",
        roles=TRAINED,
    )

    @field_validator("lora_target")
    @classmethod
    def _check_target(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if value is None:
            return None
        wanted: set[str] = set()
        for name in value:
            if name == ALL_LINEAR:
                wanted.update(PROJECTIONS)
            elif name in LAYERS:
                wanted.update(LAYERS[name])
            elif name in PROJECTIONS:
                wanted.add(name)
            else:
                known = ", ".join([ALL_LINEAR, *PROJECTIONS, *LAYERS])
                raise ValueError(f"{name!r} is no projection with adapters (nor are patterns); choose from {known}")
        if not wanted:
            raise ValueError("names no projection: write all-linear, or leave it out to train all parameters")
        return tuple(name for name in PROJECTIONS if name in wanted)

    @field_validator("freeze_module_prefix")
    @classmethod
    def _check_prefixes(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if value is not None and (not value or not all(value)):
            raise ValueError("has an empty prefix, which every parameter begins with: name modules, or leave it out")
        return value

    @model_validator(mode="after")
    def _check_switch(self) -> AdapterArgs:
        if self.lora_target is None:
            for name in ("lora_rank", "lora_alpha", "adapter_name_or_path"):
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f"{name} has no effect without lora_target, which switches LoRA on: set both")
        elif self.freeze_module_prefix is not None:
            from roll_batching.settings.support import FROZEN, ROLE_REFUSALS, Parts

            (row,) = (row for row in ROLE_REFUSALS if row.feature is FROZEN)
            raise ValueError(f"freeze_module_prefix {row.message(Parts(self, None, None, 'local'))}")
        return self

    @property
    def trains_part(self) -> bool:
        """Whether some parameters are frozen."""
        return self.lora_target is not None or self.freeze_module_prefix is not None

    def require_adapters_fit(self, architecture: Any, layers: str, layout: Any) -> None:
        """Raises `LayoutError` for parts of `architecture` and keys of `layout` that adapters are not tested with."""
        if self.lora_target is None:
            return
        from roll_batching.settings.support import ADAPTERS, FIRST_ADAPTERS, ROLE_REFUSALS, Parts, refused_pairs

        parts = Parts(self, architecture, layout, layers)
        rows = (row for row in ROLE_REFUSALS if {row.feature, row.other} & {ADAPTERS, FIRST_ADAPTERS})
        if problems := [row.error(parts) for row in refused_pairs(rows, parts)]:
            raise LayoutError("; ".join(problems))

    @property
    def lora_scale(self) -> float:
        """Factor of the adapters' output."""
        alpha = 2 * self.lora_rank if self.lora_alpha is None else self.lora_alpha
        return alpha / self.lora_rank
