"""A file of Hydra's or NeMo-RL's kind as plain data: `defaults` followed, `${...}` computed, what fails told by key.

OmegaConf and Hydra do it, as ROLL and NeMo-RL let them.
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
from roll_batching.jobs.config.yaml_values import DEEPEST, MOST_VALUES, too_large
from roll_batching.secret_names import is_secret


@dataclass(frozen=True)
class Composed:
    """A composed file."""

    data: dict[str, Any]
    """Its values, without those that could not be computed."""
    failed: dict[KeyPath, str] = field(default_factory=dict)
    """Values that could not be computed, and why."""
    outside: dict[KeyPath, str] = field(default_factory=dict)
    """Values that came from outside the file (the environment, the clock), and what asked for them."""


def compose_hydra(path: Path) -> Composed:
    """The file at `path` as Hydra composes it (ROLL's files). Raises ConfigError."""
    _require()
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    read_yaml(path)  # refuses what is no file of settings, whatever Hydra would make of it
    GlobalHydra.instance().clear()
    with _resolvers():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # `defaults` without `_self_`: the file itself goes last, as in ROLL
                with initialize_config_dir(str(path.resolve().parent), version_base="1.3"):
                    node = compose(path.name)
        except (HydraException, OmegaConfBaseException, OSError, ValueError) as error:
            raise _cannot_be_composed(path, error) from None
        except RecursionError:  # Hydra's own
            text = "inherit from each other: take out the one that leads back to this file"
            raise ConfigFileError([Problem(("defaults",), text, Place(str(path)))]) from None
        return _plain(node, path)


def compose_inheriting(path: Path) -> Composed:
    """The file at `path` over the files that its `defaults` names, as NeMo-RL reads it. Raises ConfigError."""
    _require()
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        with _resolvers():
            return _plain(OmegaConf.create(_inherited(path, ())), path)
    except OmegaConfBaseException as error:
        raise _cannot_be_composed(path, error) from None


def _inherited(path: Path, below: tuple[Path, ...]) -> dict[str, Any]:
    path = path.resolve() if below else path
    if path in below or len(below) >= DEEPEST:
        trail = " -> ".join(str(one) for one in (*below, path))
        raise ConfigFileError([Problem(("defaults",), f"inherit from each other: {trail}", Place(str(below[0])))])
    data = read_yaml(path).data
    parents = data.pop("defaults", [])
    merged: dict[str, Any] = {}
    parents = [parents] if isinstance(parents, str) else parents or []
    if not isinstance(parents, list) or not all(isinstance(parent, str) for parent in parents):
        text = f"is {shortened(repr(parents))}: name a file, or a list of files"
        raise ConfigFileError([Problem(("defaults",), text, Place(str(path)))])
    for parent in parents:
        if not (path.parent / parent).exists():
            text = f"names {parent}, and there is no file {(path.parent / parent).resolve()}: correct the path"
            raise ConfigFileError([Problem(("defaults",), text, Place(str(path)))])
        merged = _over(merged, _inherited(path.parent / parent, (*below, path)))
    result: dict[str, Any] = _over(merged, data)
    return result


def _over(below: Any, above: Any) -> Any:
    """`above` merged over `below`; a section with `_override_: true` takes the place of the one below."""
    if not isinstance(above, Mapping):
        return above
    if not isinstance(below, Mapping) or above.get("_override_"):
        below = {}
    own = {key: _over(below.get(key), value) for key, value in above.items() if key != "_override_"}
    return {**below, **{key: value for key, value in own.items() if value != "???" or key not in below}}


def _cannot_be_composed(path: Path, error: Exception) -> ConfigError:
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return ConfigFileError([Problem((), f"cannot be composed: {first}", Place(str(path)))])


def _require() -> None:
    try:
        import hydra  # noqa: F401
        import omegaconf  # noqa: F401
    except ImportError:
        raise ConfigError("converting needs Hydra and OmegaConf: pip install 'roll-batching[convert]'") from None


@contextlib.contextmanager
def _resolvers() -> Iterator[None]:
    """What the frameworks' files call in `${name:...}`, beside OmegaConf's own `oc.*`.

    Meanwhile `${oc.env:NAME}` fails where NAME looks like a secret's, and with it all that is computed from it.
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

    def variable(name: str, *default: Any) -> Any:
        if is_secret(name):
            raise ValueError(f"{name} looks like a secret, which no file should hold: set it where the job starts")
        return oc.env(name, *default)

    OmegaConf.register_new_resolver("oc.env", variable, replace=True)
    try:
        yield
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)


def _plain(node: Any, path: Path) -> Composed:
    result = Composed({})
    values = iter(range(MOST_VALUES))
    result.data.update(_section(node, (), result, values, path))
    return result


def _section(node: Any, at: KeyPath, result: Composed, values: Iterator[int], path: Path) -> dict[str, Any]:
    """`node`, an OmegaConf section, with its values computed; what fails goes into `result.failed`."""
    found: dict[str, Any] = {}
    for key in node:
        value = _value(node, key, (*at, key), result, values, path)
        if value is not _ABSENT:
            found[key] = value
    return found


_ABSENT = object()


def _value(node: Any, key: Any, at: KeyPath, result: Composed, values: Iterator[int], path: Path) -> Any:
    from omegaconf import DictConfig, ListConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if next(values, None) is None or len(at) > DEEPEST:
        raise ConfigFileError([Problem(at[:1], too_large("references (${name})"), Place(str(path)))])
    written = str(node._get_node(key)._value()) if OmegaConf.is_interpolation(node, key) else ""
    if OmegaConf.is_missing(node, key):
        result.failed[at] = "is ???: whoever starts the job must give it"
        return _ABSENT
    try:
        value = node[key]
    except (OmegaConfBaseException, RecursionError, TypeError, ValueError, ZeroDivisionError) as error:
        result.failed[at] = _why(written, error)
        return _ABSENT
    if any(f"${{{name}:" in written for name in ("oc.env", "now")):
        result.outside[at] = shortened(written)
    if isinstance(value, DictConfig):
        return _section(value, at, result, values, path)
    if isinstance(value, ListConfig):
        items = [_value(value, number, (*at, number), result, values, path) for number in range(len(value))]
        return [item for item in items if item is not _ABSENT]
    return value


def _why(written: str, error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{shortened(written)} cannot be computed: {lines[0] if lines else type(error).__name__}"
