"""FP8 training in files of NeMo-RL, slime, verl and ROLL, as keys of `strategy_config`."""

from __future__ import annotations

from roll_batching.tools.conversion.draft import Draft
from roll_batching.tools.conversion.foreign_file import ForeignFile

SCALES = "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"
"""TransformerEngine's variable: 1 keeps scales of blocks in fp32, without it they are powers of two."""
FP8_WEIGHTS = "weights are kept in bf16; their copies in FP8 are made once per optimizer step"
_LAYERS = "FP8 is of TransformerEngine's layers"


def complete_fp8(draft: Draft, *, recipe: str | None = None) -> None:
    """Adds the layers that `fp8` in a `strategy_config` needs, and the framework's default `recipe`, if it has one."""
    for role in ("actor_train", "reference", "critic"):
        section = draft.values.get(role)
        args = section.get("strategy_args") if isinstance(section, dict) else None
        layout = args.get("strategy_config") if isinstance(args, dict) else None
        if not isinstance(layout, dict) or layout.get("fp8") is None:
            continue
        path = (role, "strategy_args", "strategy_config")
        if layout.get("transformer_impl") is None:
            draft.put((*path, "transformer_impl"), "transformer_engine", f"{'.'.join(path)}.fp8", _LAYERS)
        if recipe is not None and layout.get("fp8_recipe") is None:
            draft.put((*path, "fp8_recipe"), recipe, f"{'.'.join(path)}.fp8_recipe")
            draft.defaults.add(f"{'.'.join(path)}.fp8_recipe")


def convert_nemo_rl_fp8(file: ForeignFile, section: str, layout: tuple[str, ...]) -> None:
    """The section `fp8_cfg` below `section`, where it is enabled, and the variables that it reads."""
    key = f"{section}.fp8_cfg"
    if not file.peek(f"{key}.enabled"):
        return
    for name in ("enabled", "fp8", "fp8_recipe"):  # NeMo-RL stops without the last two
        value = file.take(f"{key}.{name}")
        if value is None:
            file.draft.missing.append(f"{'.'.join((*layout, name))}: is missing: {key} has no {name}")
        elif name == "fp8":
            file.draft.put((*layout, "fp8"), value, f"{key}.fp8")
        elif name == "fp8_recipe":
            file.draft.put((*layout, "fp8_recipe"), value, f"{key}.fp8_recipe")
    file.draft.put((*layout, "transformer_impl"), "transformer_engine", f"{key}.enabled", _LAYERS)
    file.expect_off(f"{key}.fp8_param", why=FP8_WEIGHTS)
    if file.take(f"{key}.force_clear_fp8_caches") is not None:
        file.draft.leave_out(f"{key}.force_clear_fp8_caches", "idle", "changes speed or memory, not results")
    variables = file.peek(f"{section}.env_vars")
    if isinstance(variables, dict) and SCALES in variables:
        scales = str(variables.pop(SCALES))
        file.draft.put((layout[0], "system_envs", SCALES), scales, f"{section}.env_vars.{SCALES}")


def convert_slime_fp8(file: ForeignFile, layout: tuple[str, ...]) -> None:
    """Slime's options `--fp8-format` and `--fp8-recipe`, with the variable that its actors get by default."""
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
        text = "slime's actors have it, unless the environment says otherwise"
        file.draft.put((layout[0], "system_envs", SCALES), "1", "--fp8-recipe", text)
