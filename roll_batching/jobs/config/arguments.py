"""Checks keyword arguments of a class or function, such as a loss, against its own type annotations."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError
from pydantic_core import ErrorDetails, to_json

from roll_batching.errors import ConfigError
from roll_batching.jobs.config.diagnostics import Problem, nearest, shortened

_KEYWORDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True)
class Arguments:
    """The keyword arguments of a class or function, with types."""

    owner: str
    """Name of the class or function in messages: "the loss 'sft'"."""
    model: type[BaseModel]

    @classmethod
    def of(cls, owner: str, target: Callable[..., Any]) -> Arguments:
        """Reads the arguments of `target`: fields of a dataclass, else keywords of `__init__` or of a function.

        Raises ConfigError when their types cannot be resolved or checked.
        """
        try:
            parameters = inspect.signature(target).parameters.values()
            hints = _hints(target)
            fields: dict[str, Any] = {}
            keywords = [parameter for parameter in parameters if parameter.kind in _KEYWORDS]
            for index, keyword in enumerate(keywords):
                # pydantic's mark for a required field; defaults stay with `target`, since `read` returns given values
                default = ... if keyword.default is keyword.empty else None
                # Under an alias: pydantic reserves some names, such as model_config, that a keyword may have.
                fields[f"field{index}"] = (hints.get(keyword.name, Any), Field(default, alias=keyword.name))
            takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
            config = ConfigDict(
                extra="allow" if takes_all else "forbid", arbitrary_types_allowed=True, allow_inf_nan=False
            )
            return cls(owner, create_model("Arguments", __config__=config, **fields))
        except (NameError, TypeError, ValueError, AttributeError, PydanticUserError) as error:
            raise ConfigError(f"the types of the settings of {owner} cannot be read: {error}") from error

    @property
    def names(self) -> list[str]:
        """The names of the arguments."""
        return [field.alias or name for name, field in self.model.model_fields.items()]

    def read(self, given: Mapping[str, Any], path: tuple[str, ...]) -> tuple[dict[str, Any], list[Problem]]:
        """Checks `given`; returns the arguments with their types, or none and the problems, below the key `path`.

        Values are not converted between types, except lists to other sequences and integers to floats.
        """
        try:
            # Strict JSON mode takes a list for a tuple and 1 for 1.0, and converts nothing else.
            checked = self.model.model_validate_json(to_json(dict(given), inf_nan_mode="constants"), strict=True)
        except ValidationError as error:
            return {}, [self._problem(detail, path) for detail in error.errors()]
        named = {field.alias or name: name for name, field in self.model.model_fields.items()}
        extra = checked.model_extra or {}
        return {name: extra[name] if name in extra else getattr(checked, named[name]) for name in given}, []

    def _problem(self, error: ErrorDetails, path: tuple[str, ...]) -> Problem:
        """Pydantic's `error` as a problem of a setting below the key `path`."""
        key_path = (*path, *error["loc"])
        if error["type"] == "extra_forbidden":
            guess = nearest(str(key_path[-1]), self.names)
            hint = f"did you mean {guess!r}? " if guess else ""
            choices = f"the settings of {self.owner} are {', '.join(self.names)}"
            choices = choices if self.names else f"{self.owner} has no settings"
            return Problem(key_path, f"unknown setting; {hint}{choices}")
        if error["type"] == "missing":
            return Problem(key_path, f"is missing: {self.owner} needs it")
        message = str(error.get("ctx", {}).get("error") or error["msg"])
        return Problem(key_path, f"{message[0].lower()}{message[1:]}, got {shortened(repr(error['input']))}")


def _hints(target: Callable[..., Any]) -> dict[str, Any]:
    """The type of each parameter of `target`. Annotations of a dataclass are resolved in the module of its class."""
    annotated = target if dataclasses.is_dataclass(target) or not isinstance(target, type) else target.__init__  # type: ignore[misc]
    hints = get_type_hints(annotated, include_extras=True)
    return {name: hint.type if isinstance(hint, dataclasses.InitVar) else hint for name, hint in hints.items()}
