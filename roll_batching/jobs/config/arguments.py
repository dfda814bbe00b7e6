"""Settings of what a configuration names, such as a loss: checked by the types that it declares itself."""

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
    """What can be given by keyword to something, with types."""

    owner: str
    """Whose they are, for messages: "the loss 'sft'"."""
    model: type[BaseModel]

    @classmethod
    def of(cls, owner: str, made: Callable[..., Any]) -> Arguments:
        """Those of a class or function: a dataclass's fields, else the keywords of `__init__` or of the function.

        Raises ConfigError when its types cannot be resolved or checked.
        """
        try:
            parameters = inspect.signature(made).parameters.values()
            hints = _hints(made)
            fields: dict[str, Any] = {}
            for place, one in enumerate(parameter for parameter in parameters if parameter.kind in _KEYWORDS):
                default = ... if one.default is one.empty else None
                # Under an alias, since a field of a model may not have every name that a keyword has.
                fields[f"field{place}"] = (hints.get(one.name, Any), Field(default, alias=one.name))
            takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
            config = ConfigDict(
                extra="allow" if takes_all else "forbid", arbitrary_types_allowed=True, allow_inf_nan=False
            )
            return cls(owner, create_model("Arguments", __config__=config, **fields))
        except (NameError, TypeError, ValueError, AttributeError, PydanticUserError) as error:
            raise ConfigError(f"the types of the settings of {owner} cannot be read: {error}") from error

    @property
    def names(self) -> list[str]:
        """The names that can be given."""
        return [field.alias or name for name, field in self.model.model_fields.items()]

    def read(self, given: Mapping[str, Any], path: tuple[str, ...]) -> tuple[dict[str, Any], list[Problem]]:
        """(what was `given`, with its types, else nothing; what is wrong with it, `path` being the key that holds it).

        As in the rest of a configuration, values are not converted between kinds; lists become the sequences that
        are asked for.
        """
        try:
            # Strict, and as JSON, in which a list may stand for a tuple and 1 for 1.0.
            found = self.model.model_validate_json(to_json(dict(given), inf_nan_mode="constants"), strict=True)
        except ValidationError as error:
            return {}, [self._problem(one, path) for one in error.errors()]
        named = {field.alias or name: name for name, field in self.model.model_fields.items()}
        extra = found.model_extra or {}
        return {name: extra[name] if name in extra else getattr(found, named[name]) for name in given}, []

    def _problem(self, error: ErrorDetails, path: tuple[str, ...]) -> Problem:
        place = (*path, *error["loc"])
        if error["type"] == "extra_forbidden":
            guess = nearest(str(place[-1]), self.names)
            hint = f"did you mean {guess!r}? " if guess else ""
            has = f"the settings of {self.owner} are {', '.join(self.names)}"
            return Problem(place, f"unknown setting; {hint}{has if self.names else f'{self.owner} has no settings'}")
        if error["type"] == "missing":
            return Problem(place, f"is missing: {self.owner} needs it")
        message = str(error.get("ctx", {}).get("error") or error["msg"])
        return Problem(place, f"{message[0].lower()}{message[1:]}, got {shortened(repr(error['input']))}")


def _hints(made: Callable[..., Any]) -> dict[str, Any]:
    """Types by parameter; fields of dataclasses are resolved where their own class stands."""
    takes = made if dataclasses.is_dataclass(made) or not isinstance(made, type) else made.__init__  # type: ignore[misc]
    hints = get_type_hints(takes, include_extras=True)
    return {name: hint.type if isinstance(hint, dataclasses.InitVar) else hint for name, hint in hints.items()}
