"""Composes YAML files of other frameworks into plain data, with Hydra and OmegaConf as these frameworks do.

It follows `defaults` and computes `${...}`. Values that cannot be computed are recorded with their keys.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from roll_batching.errors import ConfigError
from roll_batching.jobs.config.diagnostics import ConfigFileError, KeyPath, Place, Problem, shortened
from roll_batching.jobs.config.yaml_source import read_yaml
from roll_batching.secret_names import is_secret
from roll_batching.settings.yaml_values import DEEPEST, MOST_VALUES, too_large


@dataclass(frozen=True)
class Composed:
    """The settings of a composed file."""

    data: dict[str, Any]
    """The values that could be computed."""
    failed: dict[KeyPath, str] = field(default_factory=dict)
    """Reasons of the values that could not be computed, by key."""
    outside: dict[KeyPath, str] = field(default_factory=dict)
    """Expressions in the file whose values come from the environment or the clock, by key."""
    places: dict[KeyPath, Place] = field(default_factory=dict)
    """File and line of each key, for files other than YAML."""


def compose_hydra(path: Path) -> Composed:
    """Composes the file at `path` with Hydra, as ROLL does. Raises ConfigError."""
    require_hydra()
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    read_yaml(path)  # raises our errors, with line numbers, for files that Hydra would misread
    GlobalHydra.instance().clear()
    with resolvers():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # `defaults` without `_self_`: the file itself comes last, as in ROLL
                with initialize_config_dir(str(path.resolve().parent), version_base="1.3"):
                    node = compose(path.name)
        except (HydraException, OmegaConfBaseException, OSError, ValueError) as error:
            raise _cannot_be_composed(path, error) from None
        except RecursionError:  # Hydra's own
            text = "inherit from each other: take out the one that leads back to this file"
            raise ConfigFileError([Problem(("defaults",), text, Place(str(path)))]) from None
        return plain_data(node, path)


def compose_inheriting(path: Path) -> Composed:
    """Merges the file at `path` over the files in its `defaults`, as NeMo-RL does. Raises ConfigError."""
    require_hydra()
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        with resolvers():
            return plain_data(OmegaConf.create(_merge_parents(path, ())), path)
    except OmegaConfBaseException as error:
        raise _cannot_be_composed(path, error) from None


def _merge_parents(path: Path, children: tuple[Path, ...]) -> dict[str, Any]:
    """Merges the file at `path` over its parents. `children`: the files that inherit from it, the first one first."""
    path = path.resolve() if children else path
    if path in children or len(children) >= DEEPEST:
        trail = " -> ".join(str(file) for file in (*children, path))
        text = f"inherit from each other: {trail}; take out the one that leads back"
        raise ConfigFileError([Problem(("defaults",), text, Place(str(children[0])))])
    data = read_yaml(path).data
    parents = data.pop("defaults", [])
    merged: dict[str, Any] = {}
    parents = [parents] if isinstance(parents, str) else parents or []
    if not isinstance(parents, list) or not all(isinstance(parent, str) for parent in parents):
        text = f"is {shortened(repr(parents))}: name a file, or a list of files"
        raise ConfigFileError([Problem(("defaults",), text, Place(str(path)))])
    for parent in parents:
        if not (path.parent / parent).exists():
            text = f"names {parent}, but the file {(path.parent / parent).resolve()} does not exist: correct the path"
            raise ConfigFileError([Problem(("defaults",), text, Place(str(path)))])
        merged = _merge(merged, _merge_parents(path.parent / parent, (*children, path)))
    result: dict[str, Any] = _merge(merged, data)
    return result


def _merge(base: Any, override: Any) -> Any:
    """Merges `override` over `base`. A section with `_override_: true` replaces the section of `base`."""
    if not isinstance(override, Mapping):
        return override
    if not isinstance(base, Mapping) or override.get("_override_"):
        base = {}
    merged = {key: _merge(base.get(key), value) for key, value in override.items() if key != "_override_"}
    # "???" marks a value that a child must set; it does not replace a value of the parent.
    return {**base, **{key: value for key, value in merged.items() if value != "???" or key not in base}}


def _cannot_be_composed(path: Path, error: Exception) -> ConfigError:
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return ConfigFileError([Problem((), f"cannot be composed: {first}", Place(str(path)))])


def require_hydra() -> None:
    """Raises ConfigError where Hydra or OmegaConf is not installed."""
    try:
        import hydra  # noqa: F401
        import omegaconf  # noqa: F401
    except ImportError:
        raise ConfigError("converting needs Hydra and OmegaConf: pip install 'roll-batching[convert]'") from None


@contextlib.contextmanager
def resolvers() -> Iterator[None]:
    """Context in which `${name:...}` can call the functions of these frameworks, besides OmegaConf's `oc.*`.

    Inside, `${oc.env:NAME}` fails for names that look like secrets, so that no converted value holds one.
    """
    from omegaconf import OmegaConf
    from omegaconf.resolvers import oc

    logging.getLogger("hydra").setLevel(logging.ERROR)
    resolvers: dict[str, Callable[..., Any]] = {
        "add": operator.add,
        "mul": operator.mul,
        "div": operator.truediv,
        "max": max,
        "now": lambda pattern: datetime.datetime.now().strftime(pattern),
    }
    for name, function in resolvers.items():
        if not OmegaConf.has_resolver(name):
            OmegaConf.register_new_resolver(name, function)

    def read_variable(name: str, *default: Any) -> Any:
        if is_secret(name) or is_secret(name, oc.env(name, *default)):
            raise ValueError(f"{name} looks like a secret, which no file should hold: set it where the job starts")
        return oc.env(name, *default)

    OmegaConf.register_new_resolver("oc.env", read_variable, replace=True)
    try:
        yield
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)


def plain_data(node: Any, path: Path) -> Composed:
    """The values of an OmegaConf node. Call it inside `resolvers`. `path`: the file, for messages."""
    result = Composed({})
    values = iter(range(MOST_VALUES))  # one is drawn for each value: references can make a short file endless
    result.data.update(_section(node, (), result, values, path))
    return result


def _section(node: Any, at: KeyPath, result: Composed, values: Iterator[int], path: Path) -> dict[str, Any]:
    """The values of an OmegaConf section; failures go into `result.failed`. `values` ends at the limit of values."""
    section: dict[str, Any] = {}
    for key in node:
        value = _value(node, key, (*at, key), result, values, path)
        if value is not _ABSENT:
            section[key] = value
    return section


_ABSENT = object()


def _value(node: Any, key: Any, at: KeyPath, result: Composed, values: Iterator[int], path: Path) -> Any:
    """The value of `key` in `node`, `_ABSENT` if it cannot be computed; arguments as in `_section`."""
    from omegaconf import DictConfig, ListConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if next(values, None) is None or len(at) > DEEPEST:
        raise ConfigFileError([Problem(at[:1], too_large("references (${name})"), Place(str(path)))])
    written = str(node._get_node(key)._value()) if OmegaConf.is_interpolation(node, key) else ""
    if OmegaConf.is_missing(node, key):
        result.failed[at] = "is ???: it must be set when the job is started"
        return _ABSENT
    try:
        value = node[key]
    except (OmegaConfBaseException, RecursionError, TypeError, ValueError, ZeroDivisionError) as error:
        result.failed[at] = _failure(written, error)
        return _ABSENT
    if any(f"${{{name}:" in written for name in ("oc.env", "now")):
        result.outside[at] = shortened(written)
    if isinstance(value, DictConfig):
        return _section(value, at, result, values, path)
    if isinstance(value, ListConfig):
        items = [_value(value, number, (*at, number), result, values, path) for number in range(len(value))]
        return [item for item in items if item is not _ABSENT]
    return value


def _failure(written: str, error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{shortened(written)} cannot be computed: {lines[0] if lines else type(error).__name__}"
