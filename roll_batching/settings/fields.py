"""How a settings field declares what becomes of it.

Every field of the schema is one of three kinds, and says so beside its type, so that the loader, the notices, the
reference page and the tests all read one source:

- `honoured`: the value changes what runs, where the field says that it applies;
- `noticed`: the value is accepted and does nothing here; the loader reports a notice that says why;
- `refused`: only the listed values are possible, every other one is an error that gives the reason.
"""

from __future__ import annotations

import inspect
import typing
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer
from pydantic.fields import FieldInfo

from roll_batching.planning.batching_spec import Mode

Pass = Literal["train", "infer"]
"""A pass over samples in planned micro-batches, with (`train`) or without (`infer`) gradient."""


MOST_TOKENS = 2**24
"""Most tokens of a text, a vocabulary or a step's count: more is a slip that an allocator would report late."""


class Settings(BaseModel):
    """Base of all settings: frozen, finite, unknown keys are errors, values are not converted between kinds."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)

    @model_serializer(mode="wrap")
    def _in_the_order_of_the_page(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values = handler(self)
        return {name: values[name] for name in ordered_fields(type(self)) if name in values}


@dataclass(frozen=True, kw_only=True)
class Roles:
    """The roles that read a key."""

    names: tuple[str, ...]
    otherwise: str
    """What rules in the other roles, for the notice."""


class Use:
    """What becomes of a key's value."""

    def __call__(self, schema: dict[str, Any]) -> None:
        """Adds nothing to the key's JSON schema, in which pydantic lets a field's extra speak."""


@dataclass(frozen=True, kw_only=True)
class Honoured(Use):
    """The value changes what runs. What is None applies everywhere."""

    roles: Roles | None = None
    """The roles that read the key."""
    passes: tuple[Pass, ...] | None = None
    """The passes that read the key, in whatever role makes them (`PASSES_OF_ROLES`)."""
    mode: Mode | None = None
    """The batching mode in which those passes read the key."""


@dataclass(frozen=True, kw_only=True)
class Noticed(Use):
    """The value is accepted and does nothing."""

    notice: str
    """What happens instead."""


@dataclass(frozen=True, kw_only=True)
class Refused(Use):
    """Values other than `allowed` are errors."""

    reason: str
    allowed: tuple[Any, ...]


def honoured(
    default: Any = ...,
    *,
    help: str,
    roles: Roles | None = None,
    passes: tuple[Pass, ...] | None = None,
    mode: Mode | None = None,
    **limits: Any,
) -> Any:
    """A field whose value changes what runs, where `Honoured` says. `limits` are pydantic's own (`gt`, `ge`, ...)."""
    use = Honoured(roles=roles, passes=passes, mode=mode)
    if "default_factory" in limits:
        return Field(description=help, json_schema_extra=use, **limits)
    return Field(default, description=help, json_schema_extra=use, **limits)


def noticed(default: Any, *, help: str, notice: str) -> Any:
    """A field that other systems read and this one does not. `notice` says what happens instead."""
    return Field(default, description=help, json_schema_extra=Noticed(notice=notice))


def refused(default: Any, *, help: str, reason: str, allowed: tuple[Any, ...] = ()) -> Any:
    """A field with one possible meaning here. Values other than `default` and `allowed` are errors."""
    use = Refused(reason=reason, allowed=(default, *allowed))
    return Field(default, description=help, json_schema_extra=use)


def use_of(field: FieldInfo) -> Use:
    """What becomes of the value of `field`."""
    if not isinstance(field.json_schema_extra, Use):
        raise TypeError(f"the settings field described as {field.description!r} declares no use")
    return field.json_schema_extra


def ordered_fields(settings: type[Settings]) -> dict[str, FieldInfo]:
    """The fields of `settings`, its own before those of its bases."""
    own = (name for base in settings.__mro__ for name in inspect.get_annotations(base))
    return {name: settings.model_fields[name] for name in own if name in settings.model_fields}


def nested_settings(field: FieldInfo) -> type[Settings] | None:
    """The settings class that `field` holds, alone or as one side of an optional; None for plain values."""
    if typing.get_origin(field.annotation) is dict:
        return None
    for candidate in (field.annotation, *getattr(field.annotation, "__args__", ())):
        if isinstance(candidate, type) and issubclass(candidate, Settings):
            return candidate
    return None


def named_settings(field: FieldInfo) -> type[Settings] | None:
    """The settings class that `field` holds any number of, by names of the user's; None for everything else."""
    if typing.get_origin(field.annotation) is dict:
        inside = typing.get_args(field.annotation)[1]
        if isinstance(inside, type) and issubclass(inside, Settings):
            return inside
    return None
