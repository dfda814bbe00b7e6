"""How a settings field declares what becomes of it.

Every field of the schema is one of three kinds, and says so in its metadata, so that the loader, the
reference page and the tests all read one source:

- `honoured`: the value changes what runs;
- `noticed`: the value is accepted and does nothing here; the loader reports a notice that says why;
- `refused`: only the listed values are possible, every other one is an error that gives the reason.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

Use = Literal["honoured", "noticed", "refused"]


class Settings(BaseModel):
    """Base of all settings: frozen, finite, unknown keys are errors, values are not converted between kinds."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)


def honoured(default: Any = ..., *, help: str, **limits: Any) -> Any:
    """A field whose value changes what runs. `limits` are pydantic's own (`gt`, `ge`, ...)."""
    extra: dict[str, Any] = {"use": "honoured"}
    if "default_factory" in limits:
        return Field(description=help, json_schema_extra=extra, **limits)
    return Field(default, description=help, json_schema_extra=extra, **limits)


def noticed(default: Any, *, help: str, notice: str) -> Any:
    """A field that other systems read and this one does not. `notice` says what happens instead."""
    return Field(default, description=help, json_schema_extra={"use": "noticed", "notice": notice})


def refused(default: Any, *, help: str, reason: str, allowed: tuple[Any, ...] = ()) -> Any:
    """A field with one possible meaning here. Values other than `default` and `allowed` are errors."""
    extra: dict[str, Any] = {"use": "refused", "reason": reason, "allowed": [default, *allowed]}
    return Field(default, description=help, json_schema_extra=extra)


def use_of(field: FieldInfo) -> dict[str, Any]:
    """The metadata of `field`: `use`, and `notice` or `reason` with `allowed`."""
    extra = field.json_schema_extra
    if not isinstance(extra, dict) or "use" not in extra:
        raise TypeError(f"the settings field described as {field.description!r} declares no use")
    return dict(extra)


def nested_settings(field: FieldInfo) -> type[Settings] | None:
    """The settings class that `field` holds, alone or as one side of an optional; None for plain values."""
    for candidate in (field.annotation, *getattr(field.annotation, "__args__", ())):
        if isinstance(candidate, type) and issubclass(candidate, Settings):
            return candidate
    return None
