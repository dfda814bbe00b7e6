"""Parts of a layout: context-parallel sizes per pack, FP8 and LoRA, which frameworks write alike; slime's layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from roll_batching.settings.adapters import ALL_LINEAR, LAYERS, PROJECTIONS
from roll_batching.tools.conversion.draft import Draft
from roll_batching.tools.conversion.foreign_file import FASTER, LAYOUT, PACKING, ROLE, ForeignFile, section_at

_SWITCHES = ("dynamic_context_parallel", "hybrid_context_parallel")
_CAP, _SMALLEST, _SCHEDULER = (
    "max_seqlen_per_dp_cp_rank",
    "min_dynamic_context_parallel_size",
    "sequence_packing_scheduler",
)


@dataclass(frozen=True)
class ContextSizes:
    """Settings of a file in which each pack has its own context-parallel size."""

    size: int
    """`context_parallel_size` of the file."""
    cap: int | None
    """Most tokens of a pack on one rank; None: not given."""
    cap_key: str
    """The file's key of `cap`."""


def convert_context_sizes(file: ForeignFile, key_of: Callable[[str], str]) -> ContextSizes | None:
    """Converts the keys to `context_parallel_size: auto`, or returns None if all packs have one size.

    `key_of` gives the file's key for one of Megatron's. The caller sets the cap, which frameworks count differently.
    """
    given = [key_of(name) for name in _SWITCHES if file.peek(key_of(name)) is True]
    scheduler = file.take(key_of(_SCHEDULER))
    if scheduler is not None:
        file.draft.leave_out(key_of(_SCHEDULER), "idle", "packs are planned here, whatever Megatron's scheduler")
    smallest, cap = file.take(key_of(_SMALLEST)), file.take(key_of(_CAP))
    if not given:
        for name, value in ((_SMALLEST, smallest), (_CAP, cap)):
            if value is not None:
                file.draft.leave_out(key_of(name), "idle", "it is read with dynamic context parallelism only")
        return None
    for key in given:
        file.take(key)
    if smallest not in (None, 1):
        file.draft.leave_out(key_of(_SMALLEST), "refused", "packs may have every size from 1 on")
    size = file.take(key_of("context_parallel_size"))
    if size not in (None, 1):
        why = "blocks form among all ranks that share the data; max_context_parallel_size bounds them"
        file.draft.leave_out(key_of("context_parallel_size"), "idle", why)
    meaning = "each pack has its own size, by predicted times"
    file.draft.put((*LAYOUT, "context_parallel_size"), "auto", given[0], meaning)
    return ContextSizes(size=size or 1, cap=cap, cap_key=key_of(_CAP))


def put_rank_cap(file: ForeignFile, sizes: ContextSizes, otherwise: int | None, key: str) -> None:
    """Sets the token cap of one rank: `sizes.cap`, or without that the value `otherwise` of the file's key `key`."""
    path, meaning = (*PACKING, "max_packed_sequence_length_train"), "the tokens of a pack on one rank"
    if sizes.cap is not None:
        file.draft.put(path, sizes.cap, sizes.cap_key, meaning)
        if otherwise is not None:
            file.draft.leave_out(key, "idle", f"{sizes.cap_key} is the cap")
    elif otherwise is not None:
        file.draft.put(path, otherwise, key, meaning)


# ---- fp8


SCALES = "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"
"""Variable of TransformerEngine. If it is 1, scales of blocks are fp32 numbers, otherwise powers of two."""
FP8_WEIGHTS = "weights are kept in bf16; their copies in FP8 are made once per optimizer step"
_LAYERS = "FP8 is of TransformerEngine's layers"


def complete_fp8(draft: Draft, *, recipe: str | None = None) -> None:
    """Adds the layers that `fp8` in a `strategy_config` needs, and the framework's default `recipe`, if it has one."""
    for role in ("actor_train", "reference", "critic"):
        layout = section_at(draft.values, role, "strategy_args", "strategy_config")
        if layout.get("fp8") is None:
            continue
        path = (role, "strategy_args", "strategy_config")
        if layout.get("transformer_impl") is None:
            draft.put((*path, "transformer_impl"), "transformer_engine", f"{'.'.join(path)}.fp8", _LAYERS)
        if recipe is not None and layout.get("fp8_recipe") is None:
            draft.put((*path, "fp8_recipe"), recipe, f"{'.'.join(path)}.fp8_recipe")
            draft.defaults.add(f"{'.'.join(path)}.fp8_recipe")


def convert_nemo_rl_fp8(file: ForeignFile, section: str, layout: tuple[str, ...]) -> None:
    """Converts `fp8_cfg` in `section` if it is enabled, and the environment variable that it reads."""
    key = f"{section}.fp8_cfg"
    if not file.peek(f"{key}.enabled"):
        return
    for name in ("enabled", "fp8", "fp8_recipe"):  # NeMo-RL stops without the last two
        value = file.take(f"{key}.{name}")
        if value is None:
            file.draft.missing.append(f"{'.'.join((*layout, name))}: is missing: {key} has no {name}")
        elif name != "enabled":
            file.draft.put((*layout, name), value, f"{key}.{name}")
    file.draft.put((*layout, "transformer_impl"), "transformer_engine", f"{key}.enabled", _LAYERS)
    file.expect_off(f"{key}.fp8_param", why=FP8_WEIGHTS)
    file.leave_out(f"{key}.force_clear_fp8_caches", "idle", FASTER)
    variables = file.peek(f"{section}.env_vars")
    if isinstance(variables, dict) and SCALES in variables:
        scales = str(variables.pop(SCALES))
        file.draft.put((layout[0], "system_envs", SCALES), scales, f"{section}.env_vars.{SCALES}")


def convert_slime_fp8(file: ForeignFile, layout: tuple[str, ...]) -> None:
    """Converts slime's FP8 options, and sets the environment variable that slime's actors get by default."""
    fp8 = file.take("--fp8-format")
    if fp8 is None:
        return
    recipe = file.take("--fp8-recipe")
    if recipe is None:
        recipe = "delayed"
        file.draft.defaults.add("--fp8-recipe")
    file.draft.put((*layout, "fp8"), fp8, "--fp8-format")
    file.draft.put((*layout, "fp8_recipe"), recipe, "--fp8-recipe")
    file.draft.put((*layout, "transformer_impl"), "transformer_engine", "--fp8-format", _LAYERS)
    for name in ("first-last-layers-bf16", "num-layers-at-start-in-bf16", "num-layers-at-end-in-bf16"):
        file.move(f"--{name}", (*layout, name.replace("-", "_")))
    if recipe == "blockwise":
        meaning = "slime's actors have it, unless the environment says otherwise"
        file.draft.put((layout[0], "system_envs", SCALES), "1", "--fp8-recipe", meaning)


# ---- slime


def convert_slime_layout(file: ForeignFile) -> None:
    """Converts slime's sequence parallelism, router replay, router bias and FP8."""
    parallel, key = file.take("--sequence-parallel"), "--sequence-parallel"
    if section_at(file.draft.values, *LAYOUT).get("tensor_model_parallel_size", 1) > 1:
        file.put((*LAYOUT, "sequence_parallel"), bool(parallel), key)
    elif parallel:
        file.draft.leave_out(key, "idle", "the tensor-parallel size is 1")
    for option, mode in (("--use-routing-replay", "R2"), ("--use-rollout-routing-replay", "R3")):
        if file.take(option):
            file.put((ROLE, "router_replay", "mode"), mode, option)
    rate, key = file.take("--moe-router-bias-update-rate"), "--moe-router-bias-update-rate"
    if rate is None and file.peek("--moe-router-enable-expert-bias"):
        rate = 1e-3
        file.draft.defaults.add(key)
    file.put((*LAYOUT, "moe_router_bias_update_rate"), rate, key)
    convert_slime_fp8(file, LAYOUT)


# ---- adapters


_NAMES: Mapping[str, tuple[str, ...]] = {
    ALL_LINEAR: PROJECTIONS,
    **LAYERS,
    **{name: (name,) for name in PROJECTIONS},
    **{f"linear_{name}": (f"{name}_proj",) for name in "qkv"},
    **{f"linear_fc1_{name}": (f"{name}_proj",) for name in ("gate", "up")},
}
"""Projections of the model by every name of PEFT, of Megatron-Bridge and of its canonical LoRA."""
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
        shares_a: whether projections that Megatron fuses share a matrix A in the framework.
        names: keys that are left out where they are on, with the reason.
    """
    file.move(f"{section}.{rank}", (*_MODEL, "lora_rank"))
    alpha_name, alpha_default = alpha
    scale = file.take(f"{section}.{alpha_name}", alpha_default)
    scale = alpha_default if scale is None else scale
    file.draft.put((*_MODEL, "lora_alpha"), scale, f"{section}.{alpha_name}")
    key = f"{section}.target_modules"
    wanted, unknown = _projections(file.take(key) or [ALL_LINEAR])
    dropped, unknown_excluded = _projections(file.take(f"{section}.exclude_modules") or ())
    target = [name for name in PROJECTIONS if name in wanted - dropped]
    if unknown or not target:
        why = f"{', '.join(unknown) or 'nothing'}: adapters are of {', '.join(PROJECTIONS)}; all of them are written"
        file.draft.leave_out(key, "refused", why)
        target = list(PROJECTIONS)
    if unknown_excluded:
        why = f"{', '.join(unknown_excluded)}: patterns are not read; name projections in lora_target"
        file.draft.leave_out(f"{section}.exclude_modules", "refused", why)
    value = ALL_LINEAR if len(target) == len(PROJECTIONS) else ",".join(target)
    file.draft.put((*_MODEL, "lora_target"), value, key, _OWN_A if shares_a else "")
    for name, why in names.items():
        file.expect_off(f"{section}.{name}", why=why)


def convert_verl_adapters(file: ForeignFile, model: str) -> None:
    """Converts verl's LoRA if it is on: PEFT's keys under FSDP, the section `lora` of Megatron-Bridge otherwise."""
    section = f"{model}.lora"
    if file.peek(f"{section}.rank"):
        for name in ("lora_rank", "lora_alpha", "target_modules", "exclude_modules"):
            file.take(f"{model}.{name}")
        kind = file.take(f"{section}.type") or "lora"
        if kind not in ("lora", "canonical_lora"):
            file.draft.leave_out(f"{section}.type", "refused", f"{kind}: adapters are plain LoRA")
        # Engines get merged weights, and without dropout the rest says how the same numbers are computed.
        for name in (
            *("merge", "dropout_position", "lora_A_init_method", "lora_B_init_method", "a2a_experimental", "dtype"),
            *("freeze_vision_model", "freeze_vision_projection", "freeze_language_model"),
        ):
            file.take(f"{section}.{name}")
        whys = {
            "dropout": "adapters have no dropout: the first ratio would differ from 1",
            "adapter_path": (
                "is a checkpoint of Megatron-Bridge; adapter_name_or_path takes a directory in PEFT's format"
            ),
        }
        convert_adapters(file, section, rank="rank", alpha=("alpha", 32), shares_a=kind == "lora", **whys)
    elif file.peek(f"{model}.lora_rank"):
        file.take(section)
        file.move(f"{model}.lora_adapter_path", (*_MODEL, "adapter_name_or_path"))
        convert_adapters(file, model, rank="lora_rank", alpha=("lora_alpha", 16), shares_a=False)


def _projections(names: Any) -> tuple[set[str], list[str]]:
    """(Projections, unknown names) of `names`: a list, or a text with commas."""
    listed: Iterable[Any] = names.split(",") if isinstance(names, str) else names
    projections: set[str] = set()
    unknown = []
    for name in map(str, listed):
        projections.update(_NAMES.get(name.strip(), ()))
        if name.strip() not in _NAMES:
            unknown.append(name)
    return projections, unknown
