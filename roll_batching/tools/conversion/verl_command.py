"""Composes files of verl: YAML files, and shell scripts whose command overrides verl's settings."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from roll_batching.jobs.config.diagnostics import ConfigFileError, KeyPath, Place, Problem, dotted, shortened
from roll_batching.jobs.config.frameworks import PROGRAMS, VERLS_OWN_FILES
from roll_batching.jobs.config.yaml_source import read_yaml
from roll_batching.settings.yaml_values import DEEPEST
from roll_batching.tools.conversion.composing import Composed, plain_data, require_hydra, resolvers
from roll_batching.tools.conversion.shell_script import Script, Value, read_script, training_command
from roll_batching.tools.conversion.verl_file import VERL, has_critic

PROGRAM = "program"
"""Key of the program's name among the settings of a script."""
GROUPS = "config_groups"
"""Key of the groups of files that a script chooses, such as `model_engine: megatron`."""
_LAUNCHER = {"nproc": "n_gpus_per_node", "nnodes": "nnodes"}
"""Key of `trainer` by option of torchrun, without `_per_node`. The option wins over the key."""
_TORCHRUN = re.compile(r"(.*/)?torchrun|torch\.distributed\.(run|launch)")
_GROUP_NAMES = ("model_engine", "engine", "optim", "model", "actor", "ref", "critic", "rollout", "data", "reward")


def is_program(word: str) -> bool:
    """Whether `word` is a training program of verl, of a recipe or of a fork."""
    return PROGRAMS["verl"].fullmatch(word) is not None


def compose_verl(path: Path) -> Composed:
    """The settings of the YAML file or script at `path`. Raises ConfigError."""
    require_hydra()
    if path.suffix in (".yaml", ".yml"):
        return _compose_yaml(path)
    script = read_script(path)
    command, at = training_command(script, is_program, "a trainer of verl (-m verl.trainer.main_ppo)")
    composed = _compose_command(command.words[at].text or "", command.words[at + 1 :], script)
    _take_launcher(command.words[:at], composed)
    return composed


def _take_launcher(words: tuple[Value, ...], composed: Composed) -> None:
    """Writes the process and machine counts of torchrun (1 by default) over the keys of `trainer`."""
    if any(_TORCHRUN.fullmatch(word.text or word.raw) for word in words):
        composed.data.setdefault("trainer", {}).update(dict.fromkeys(_LAUNCHER.values(), 1))
    for position, word in enumerate(words[:-1]):
        option, equals, value = (word.text or word.raw).strip("\"'").partition("=")
        name = option.lstrip("-").replace("-", "_")
        key = _LAUNCHER.get(name.removesuffix("_per_node"))
        if key is None or not option.startswith("--"):
            continue
        argument = replace(word, text=None if word.text is None else value) if equals else words[position + 1]
        path, trainer = ("trainer", key), composed.data.setdefault("trainer", {})
        composed.places[path] = word.place
        if argument.text is not None and argument.text.isdigit() and int(argument.text) > 0:
            trainer[key] = int(argument.text)
        else:
            why = argument.why or f"{shortened(argument.text or argument.raw)} is no number of processes"
            composed.failed[path] = f"line {word.place.line}: {option}: {why}"
            trainer[key] = None


def _compose_yaml(path: Path) -> Composed:
    """Composes one YAML file of verl; parents that are not verl's own are recorded as not followed."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    data = read_yaml(path).data
    parents = data.pop("defaults", None) or []
    data.pop("hydra", None)
    groups: dict[str, str] = {}
    foreign = []
    for parent in parents if isinstance(parents, list) else [parents]:
        if isinstance(parent, dict) and len(parent) == 1:
            name, value = next(iter(parent.items()))
            groups[str(name).removeprefix("override ").partition("@")[0].strip("/")] = str(value)
        elif VERLS_OWN_FILES.fullmatch(str(parent)):
            groups |= {"model_engine": "megatron"} if "megatron" in str(parent) else {}
        elif parent != "_self_":
            foreign.append(str(parent))
    try:
        with resolvers():
            composed = plain_data(OmegaConf.create(data), path)
    except OmegaConfBaseException as error:
        raise _fault((), error, Place(str(path))) from None
    for key in [key for key in composed.failed if VERL.is_idle(dotted(key))]:
        if not (_is_of_critic(dotted(key)) and has_critic(composed.data)):
            del composed.failed[key]
    if foreign:
        text = f"names {shortened(', '.join(foreign))}, which is not followed: convert what verl composes (--cfg job)"
        composed.failed[("defaults",)] = text
    if groups and composed.data:
        composed.data[GROUPS] = groups
    return composed


def _compose_command(program: str, words: tuple[Value, ...], script: Script) -> Composed:
    """Composes the overrides of a command. What only a shell could tell goes into `failed`, with the reason."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    settings = OmegaConf.create({})
    groups: dict[str, str] = {}
    extra = Composed({})
    problems: list[Problem] = []
    for word in words:
        key = (word.text or word.raw).partition("=")[0].strip("\"'").lstrip("+~")
        path: KeyPath = tuple(key.split("."))
        if key.startswith("--") or (word.text == ""):
            if key == "--config-name" and "megatron" in (word.text or ""):
                groups.setdefault("model_engine", "megatron")
            continue
        if (word.conditional or word.text is None) and VERL.is_idle(key) and not _is_of_critic(key):
            continue
        if word.conditional:
            why = "a condition, which is not evaluated, decides whether it is given: set it here if it applies"
            extra.failed[(f"{key} (line {word.place.line})",)] = why
            continue
        if word.text is None:
            name = path if re.fullmatch(r"[\w.@/-]+", key) else (shortened(key, 40),)
            extra.failed[name] = f"line {word.place.line}: {word.why}"
            if len(name) > 1:
                _update(settings, ".".join(map(str, name)), None)
            continue
        try:
            value, deleted = _override(word.text, len(path), word.place)
            if "@" in key or (len(path) == 1 and key in _GROUP_NAMES and isinstance(value, str)):
                groups[key.partition("@")[0]] = str(value)
                continue
            before = OmegaConf.select(settings, key, default=None)
            if deleted:
                OmegaConf.update(settings, key, None, merge=False, force_add=True)
            else:
                _update(settings, key, value)
        except OmegaConfBaseException as error:
            problems += _fault(path, error, word.place).problems
            continue
        except ConfigFileError as error:
            problems += error.problems
            continue
        if path in extra.places and before != OmegaConf.select(settings, key, default=None):
            first = extra.places[path].line
            extra.failed.setdefault(
                (f"{key} (line {first})",), f"is given again on line {word.place.line}, whose value counts"
            )
        extra.failed.pop(path, None)
        extra.places[path] = word.place
        if word.from_home:
            extra.outside[path] = "$HOME"
    if problems:
        raise ConfigFileError(problems)
    with resolvers():
        composed = plain_data(settings, script.path)
    if composed.data.pop("hydra", None) is not None:
        composed.failed[("hydra",)] = "chooses other files of settings, which are not followed"
    composed.data.update({PROGRAM: program, GROUPS: groups})
    trains_critic = has_critic(composed.data)
    failed = {key: why for key, why in extra.failed.items() if trains_critic or not _is_of_critic(dotted(key))}
    composed.failed.update(failed)
    composed.outside.update(extra.outside)
    composed.places.update(extra.places)
    for place, why in script.unread_sources:
        composed.failed[(f"source (line {place.line})",)] = why
    return composed


def _is_of_critic(key: Any) -> bool:
    """Whether `key`, or a path that begins with it, matters only in a job with a critic."""
    return str(key).startswith(("critic", "trainer.critic_warmup", "algorithm.lam"))


def _update(settings: Any, key: str, value: Any) -> None:
    from omegaconf import OmegaConf

    OmegaConf.update(settings, key, value, merge=True, force_add=True)


def _override(text: str, depth: int, place: Place) -> tuple[Any, bool]:
    """(Value, whether the override deletes its key) of `text`, one override of Hydra. Raises ConfigFileError."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    key = text.partition("=")[0]
    try:
        if "=" not in text and not text.startswith("~"):
            raise ValueError("is no setting: write key=value")
        if depth > DEEPEST:
            raise ValueError(f"is a path of {depth} keys; no setting lies deeper than {DEEPEST}")
        override = OverridesParser.create().parse_override(text)
        if override.is_sweep_override():
            raise ValueError("sweeps over several values: write one")
        return override.value(), override.is_delete()
    except (HydraException, ValueError, RecursionError) as error:
        raise _fault((shortened(key),), error, place) from None


def _fault(path: KeyPath, error: Exception, place: Place) -> ConfigFileError:
    lines = str(error).strip().splitlines()
    return ConfigFileError([Problem(path, lines[0] if lines else type(error).__name__, place)])
