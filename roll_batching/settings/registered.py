"""Values that name something registered, or anybody's own by its dotted path."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, core_schema

from roll_batching.errors import ConfigError
from roll_batching.registry import Registry


@dataclass(frozen=True)
class RegisteredName:
    """Beside `str` in a field's type: a name of `registry`, or a dotted path, which is loaded when it is used."""

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


def registered_name(field: FieldInfo) -> RegisteredName | None:
    """What the value of `field` names; None where it names nothing registered."""
    return next((item for item in field.metadata if isinstance(item, RegisteredName)), None)
