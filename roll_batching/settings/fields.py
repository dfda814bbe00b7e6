"""Fields of settings: their help text, their limits, and who reads them under which other settings.

Loader, notices, reference page and tests all read this one declaration beside the field's type.
"""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from annotated_types import DocInfo
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    SerializerFunctionWrapHandler,
    TypeAdapter,
    create_model,
    model_serializer,
)
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, core_schema

from roll_batching.errors import ConfigError
from roll_batching.planning.batching_spec import Mode
from roll_batching.registry import DOTTED, Registry

Pass = Literal["train", "infer"]
"""A pass over samples in planned micro-batches, with (`train`) or without (`infer`) gradient."""


MOST_TOKENS = 2**24
"""Upper limit of token and sample counts: a typo beyond it would otherwise fail late, in an allocation."""
MOST_PROCESSES = 1024
"""Upper limit of processes that a rank starts for one purpose."""


class Settings(BaseModel):
    """Base of all settings: frozen, finite, unknown keys are errors, values are not converted between kinds.

    `read_if` says under which switches a class's fields are read: it maps names of fields, separated by spaces, to one
    switch, or to several that must all be on. "*" stands for the fields that no other entry names.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)

    def __init_subclass__(cls, *, read_if: Switches | None = None, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)

    @classmethod
    def __pydantic_init_subclass__(cls, *, read_if: Switches | None = None, **keywords: Any) -> None:
        super().__pydantic_init_subclass__(**keywords)
        rows = {name: switches for names, switches in (read_if or {}).items() for name in names.split()}
        others = rows.pop("*", ())
        for name in inspect.get_annotations(cls) if read_if else ():
            if (field := cls.model_fields.get(name)) is not None:
                switches = rows.pop(name, others)
                switches = (switches,) if isinstance(switches, Switch) else switches
                field.json_schema_extra = replace(scope_of(field), switches=switches)
        if rows:
            raise TypeError(f"read_if of {cls.__name__} names no fields: {', '.join(rows)}")

    @model_serializer(mode="wrap")
    def _in_the_order_of_the_page(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values = handler(self)
        return {name: values[name] for name in ordered_fields(type(self)) if name in values}


@dataclass(frozen=True, kw_only=True)
class Roles:
    """The roles that read a key."""

    names: tuple[str, ...]
    otherwise: str
    """Why the other roles do not read it, for the notice."""


POLICY = Roles(names=("actor_train",), otherwise="the policy in training alone reads it")
TRAINED = Roles(names=("actor_train", "critic"), otherwise="this role is not trained")


@dataclass(frozen=True)
class Switch:
    """Other settings under which a key is read."""

    is_on: Callable[[Any], object]
    """Tests the section that has the key."""
    otherwise: str
    """Why the key is not read, for the notice; `{0.name}` is a value of that section."""
    of_job: bool = False
    """Whether `is_on` and `otherwise` get the job instead of the section."""


Switches = Mapping[str, Switch | tuple[Switch, ...]]


def tasks(*names: str, otherwise: str) -> Switch:
    """The switch of keys that only jobs of the tasks `names` read; `otherwise` says why other tasks do not."""
    return Switch(lambda job: job.task in names, f"task is {{0.task}}, {otherwise}", of_job=True)


ROLLOUTS = tasks("grpo", "distill", otherwise="which makes no rollouts")
ADVANTAGES = tasks("grpo", otherwise="whose loss reads no advantages")
OLD_LOG_PROBS = tasks("grpo", otherwise="which has no old log-probs")


@dataclass(frozen=True, kw_only=True)
class Scope:
    """Scope of a key: the roles, passes and mode that read it (None: all), and the switches that must be on."""

    roles: Roles | None = None
    """The roles that read the key."""
    passes: tuple[Pass, ...] | None = None
    """The passes that read the key, in every role that makes them (`PASSES_OF_ROLES`)."""
    mode: Mode | None = None
    """The batching mode in which those passes read the key."""
    switches: tuple[Switch, ...] = ()

    def __call__(self, schema: dict[str, Any]) -> None:
        """Adds nothing to the JSON schema of the field: pydantic calls a field's `json_schema_extra`, which this is."""


def setting(
    default: Any = ...,
    *,
    help: str,
    roles: Roles | None = None,
    passes: tuple[Pass, ...] | None = None,
    mode: Mode | None = None,
    **limits: Any,
) -> Any:
    """A field of settings with its `Scope`. `limits` are pydantic's own (`gt`, `ge`, `default_factory`, ...)."""
    scope = Scope(roles=roles, passes=passes, mode=mode)
    if "default_factory" in limits:
        return Field(description=help, json_schema_extra=scope, **limits)
    return Field(default, description=help, json_schema_extra=scope, **limits)


@dataclass(frozen=True)
class InFile:
    """Annotation of a dataclass's field: the narrower type that a file may give."""

    type: Any


@dataclass(frozen=True)
class AlsoInFile:
    """Annotation of a field: a further type that a file may give, and its conversion."""

    type: Any
    convert: Callable[[Any], Any]
    """Converts values of that type, and returns others unchanged."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self.convert, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [handler(schema), TypeAdapter(self.type).json_schema()]}


OR_NULL = AlsoInFile(None, lambda value: {} if value is None else value)
"""Annotation of a section: `section: ~` is a section of defaults."""


def require_positive(value: int | str | None) -> int | str | None:
    """`value`. Raises ValueError for a number below 1; words and None pass."""
    if isinstance(value, int) and value < 1:
        raise ValueError(f"is {value}; it must be at least 1")
    return value


def section_of(kind: type[Any]) -> type[Settings]:
    """The section of a file for the dataclass `kind`: its fields with a `doc`, before those of its bases.

    Types, bounds and defaults are those of the dataclass.
    """
    types, defaults = (
        typing.get_type_hints(kind, include_extras=True),
        {f.name: f.default for f in dataclasses.fields(kind)},
    )
    names = [name for base in kind.__mro__ for name in inspect.get_annotations(base) if name in defaults]
    section: dict[str, Any] = {}
    for name in dict.fromkeys(names):
        metadata = getattr(types[name], "__metadata__", ())
        help = next((item.documentation for item in metadata if isinstance(item, DocInfo)), None)
        narrower = next((item.type for item in metadata if isinstance(item, InFile)), types[name])
        if help is not None:
            section[name] = (narrower, setting(defaults[name], help=help))
    return create_model(kind.__name__, __base__=Settings, **section)


def scope_of(field: FieldInfo) -> Scope:
    """Scope of the key of `field`."""
    if not isinstance(field.json_schema_extra, Scope):
        raise TypeError(f"the settings field described as {field.description!r} is not made by setting()")
    return field.json_schema_extra


def ordered_fields(settings: type[Settings]) -> dict[str, FieldInfo]:
    """The fields of `settings`; fields of the class itself come before inherited ones."""
    own = (name for base in settings.__mro__ for name in inspect.get_annotations(base))
    return {name: settings.model_fields[name] for name in own if name in settings.model_fields}


def nested_settings(field: FieldInfo) -> type[Settings] | None:
    """The settings class of the section that `field` is, optional or not; None for plain values."""
    if typing.get_origin(field.annotation) is dict:
        return None
    for candidate in (field.annotation, *getattr(field.annotation, "__args__", ())):
        if isinstance(candidate, type) and issubclass(candidate, Settings):
            return candidate
    return None


def named_settings(field: FieldInfo) -> type[Settings] | None:
    """The settings class of the values of a field of the type dict[str, Settings]; None for other fields."""
    if typing.get_origin(field.annotation) is dict:
        inside = typing.get_args(field.annotation)[1]
        if isinstance(inside, type) and issubclass(inside, Settings):
            return inside
    return None


@dataclass(frozen=True)
class RegisteredName:
    """Annotation of a `str` field: a name of `registry`, or a dotted path, which is loaded when it is used."""

    registry: Registry[Any]

    def check(self, name: str | None) -> str | None:
        """`name`, if the registry has it or it is written as a dotted path. Raises ValueError."""
        try:
            if name is not None:  # where the field allows it
                self.registry.get(name)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return name

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        names = {"enum": list(self.registry.names)}, {"type": "string", "pattern": f"^{DOTTED}$"}
        return {"anyOf": [*names, *(option for option in handler(schema).get("anyOf", ()) if option["type"] == "null")]}


def registered_name(field: FieldInfo) -> RegisteredName | None:
    """The registry in which the value of `field` names an entry; None for other fields."""
    return next((item for item in field.metadata if isinstance(item, RegisteredName)), None)
