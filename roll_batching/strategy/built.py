"""Attributes of a strategy that exist once it has a model."""

from __future__ import annotations

from typing import Any

from roll_batching.errors import LayoutError


class _OfBuiltModel:
    """Stands in the class until the instance's own attribute hides it; read before that, it says what to call."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, strategy: object | None, owner: type) -> Any:
        if strategy is None:
            return self
        raise LayoutError(
            f"this {owner.__name__} has no model yet, and so no {self._name}: call initialize() first, or make it with "
            "from_parts"
        )


def of_built_model() -> Any:
    """A class attribute that the instance gets with its model; read before, it raises `LayoutError`."""
    return _OfBuiltModel()
