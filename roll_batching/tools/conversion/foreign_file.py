"""The settings of another framework's file, and the reasons for keys that its translation does not read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from roll_batching.tools.conversion.draft import Draft

ROUTERS = "of a mixture of experts, whose routers"


def reasons_of(kind: str, table: Mapping[str, str], prefix: str = "") -> tuple[tuple[str, str, str], ...]:
    """Rows of `ForeignFile.reasons`; `table` has by reason the names, separated by spaces."""
    return tuple((f"{prefix}{name}", kind, why) for why, names in table.items() for name in names.split())


class ForeignFile:
    """Settings of a file, which the translation takes out one by one, and the draft of the result."""

    reasons: ClassVar[tuple[tuple[str, str, str], ...]] = ()
    """By prefix of a key: kind and reason for leaving out the keys below it."""
    speed: ClassVar[frozenset[str]] = frozenset()
    """Names of settings that change speed or memory, not results."""

    def __init__(self, data: dict[str, Any], draft: Draft) -> None:
        self.data, self.draft = data, draft

    @classmethod
    def is_idle(cls, key: str) -> bool:
        """Whether `key`, whatever its value, has no effect here."""
        return next((kind for name, kind, _ in cls.reasons if _is_below(name, key)), "") == "idle"

    def peek(self, key: str, default: Any = None) -> Any:
        """The value of `key`, which still counts as unread."""
        here: Any = self.data
        for part in key.split("."):
            if not isinstance(here, dict) or part not in here:
                return default
            here = here[part]
        return here

    def take(self, key: str, default: Any = None) -> Any:
        """The value of `key`, which then counts as read."""
        value = self.peek(key, default)
        *sections, last = key.split(".")
        section = self.peek(".".join(sections)) if sections else self.data
        if isinstance(section, dict):
            section.pop(last, None)
        return value

    def move(
        self, key: str, path: tuple[str, ...], change: Callable[[Any], Any] = lambda value: value, meaning: str = ""
    ) -> None:
        """Puts the value of `key`, where there is one, at `path`."""
        value = self.take(key)
        if value is not None:
            self.draft.put(path, change(value), key, meaning)

    def expect_off(self, *keys: str, why: str) -> None:
        """Leaves out keys that must be off; as refused, with the reason `why`, where one is on."""
        for key in keys:
            value = self.take(key)
            if value is not None:
                off = _is_off(value)
                self.draft.leave_out(key, "idle" if off else "refused", "is off, as here" if off else why)

    def leave_out_rest(self) -> None:
        """Leaves out all keys that were not taken, by section."""
        self._rest(self.data, "")

    def _rest(self, section: Mapping[str, Any], above: str) -> None:
        for name, value in section.items():
            key = f"{above}{name}"
            reason = next((one for one in self.reasons if _is_below(one[0], key)), None)
            if value == {}:
                continue  # all its keys were taken
            if _is_off(value) and (
                not isinstance(value, dict) or {"enabled", "enable"} & value.keys() or (reason and key == reason[0])
            ):
                self.draft.leave_out(key, "idle", "is off, as here")
            elif name in self.speed or (name == "expert_tensor_parallel_size" and value == 1):
                self.draft.leave_out(key, "idle", "changes speed or memory, not results")
            elif reason is not None and (reason[1] == "idle" or not isinstance(value, dict) or key == reason[0]):
                self.draft.leave_out(key, "refused" if reason[1] == "refused" else "idle", reason[2])
            elif isinstance(value, dict):
                self._rest(value, f"{key}.")
            else:
                self.draft.leave_out(key, "unknown", "there is no such setting here")


def _is_below(prefix: str, key: str) -> bool:
    """Whether `key` is the section `prefix` or lies in it. One that ends in `_`, `-` or `.` begins keys."""
    return key == prefix or key.startswith(prefix if prefix.endswith(("_", "-", ".")) else f"{prefix}.")


def _is_off(value: Any) -> bool:
    """Whether `value` is off, or a section that is switched off."""
    if isinstance(value, dict):
        return False in (value.get("enabled"), value.get("enable")) or all(_is_off(below) for below in value.values())
    return value in (None, False, 0, "none", [])
