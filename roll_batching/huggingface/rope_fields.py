"""Translates the fields of RoPE in a `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roll_batching.huggingface.translation import Translation

_ORIGINAL = "original_max_position_embeddings"
_NEEDED: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL),
    "yarn": ("factor", _ORIGINAL),
}
"""Parameters of each kind of RoPE."""
_YARN = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate")
"""Parameters of YaRN that may be absent."""


def translate_rope(values: Mapping[str, Any], base: Any, share: Any, result: Translation) -> None:
    """Translates RoPE as transformers 4 (`rope_theta`, `rope_scaling`) or 5 (`rope_parameters`) writes it.

    `base` is `rope_theta` and `share` is `partial_rotary_factor`, or the family's defaults.
    """
    name = "rope_parameters" if values.get("rope_parameters") is not None else "rope_scaling"
    section = values.get(name)
    rope = dict(section) if isinstance(section, Mapping) else {}
    older = values.get("rope_scaling")
    if older is not None and older not in (section, {key: rope[key] for key in rope if key != "rope_theta"}):
        result.problems.append(f"rope_scaling: {older!r} contradicts rope_parameters; leave one of them out")
    if section is not None and not isinstance(section, Mapping):
        result.problems.append(f"{name}: {section!r} is not supported: it must be an object")
    theta = values.get("rope_theta")
    if theta is not None and rope.get("rope_theta", theta) != theta:
        other = f"{name}.rope_theta: {rope['rope_theta']!r}"
        result.problems.append(f"rope_theta: {theta!r} contradicts {other}; leave one of them out")
    result.architecture["rotary_base"] = rope.pop("rope_theta", base)
    kinds = [rope.pop(key) for key in ("rope_type", "type") if key in rope]
    kind = kinds[0] if kinds else "default"
    inner = rope.pop("partial_rotary_factor", share)
    if inner != share and (share == 1.0 or values.get("partial_rotary_factor") is not None):
        known = f"partial_rotary_factor: {share!r}"
        result.problems.append(f"{name}.partial_rotary_factor: {inner!r} is not supported beside {known}")
    if inner != 1.0:
        result.architecture["rotary_percent"] = inner
    if kind not in _NEEDED:
        result.problems.append(f"{name}.rope_type {kind!r} is not supported, only {', '.join(_NEEDED)}")
        return
    needed = _NEEDED[kind]
    optional = _YARN if kind == "yarn" else ()
    if kind == "yarn" and rope.get("factor") is None:
        longest, original = values.get("max_position_embeddings"), rope.get("original_max_position_embeddings")
        if isinstance(longest, int) and isinstance(original, int) and original > 0:
            rope["factor"] = longest / original
    missing = [key for key in needed if rope.get(key) is None]
    result.problems += [f"{name}.{key} is missing" for key in missing]
    result.problems += [
        f"{name}.{key} has no effect with rope_type {kind}" for key in rope if key not in (*needed, *optional)
    ]
    if needed and not missing:
        given = {key: rope[key] for key in (*needed, *optional) if rope.get(key) is not None}
        result.architecture["rope_scaling"] = {"type": kind, **given}


_KINDS = ("full_attention", "sliding_attention")
"""Kinds of layers in `rope_parameters` of families whose layers with a window have RoPE of their own."""


def translate_two_ropes(config: Mapping[str, Any], values: Mapping[str, Any], result: Translation) -> None:
    """Translates RoPE of layers without and with a window, as transformers 4 (`rope_local_base_freq`) or 5 writes it.

    `values` is `config` with the family's defaults.
    """
    section = config.get("rope_parameters")
    full: dict[str, Any] = {"rope_theta": values["rope_theta"], **(config.get("rope_scaling") or {})}
    local: dict[str, Any] = {"rope_theta": values["rope_local_base_freq"]}
    if section is not None:
        wrong = not isinstance(section, Mapping) or set(section) - set(_KINDS)
        if wrong or not all(isinstance(one, Mapping | None) for one in section.values()):
            result.problems.append(f"rope_parameters: {section!r} must be an object of {' and '.join(_KINDS)}")
            return
        for name, key, parts in (("rope_theta", _KINDS[0], full), ("rope_local_base_freq", _KINDS[1], local)):
            given = section.get(key) or {}
            older = {**({"rope_theta": config[name]} if config.get(name) is not None else {})}
            older |= (config.get("rope_scaling") or {}) if parts is full else {}
            if any(part in given and given[part] != value for part, value in older.items()):
                result.problems.append(f"rope_parameters.{key} contradicts {older!r}; leave one of them out")
            parts.update(given)
    rest = {name: value for name, value in config.items() if name not in ("rope_theta", "rope_scaling")}
    translate_rope({**rest, "rope_parameters": full}, values["rope_theta"], 1.0, result)
    if local.pop("rope_type", "default") != "default" or set(local) != {"rope_theta"}:
        text = f"rope_parameters.sliding_attention: {section and section.get('sliding_attention')!r} is not supported"
        result.problems.append(f"{text}: only rope_theta of the default rope_type")
    result.architecture["rotary_local_base"] = local["rope_theta"]
