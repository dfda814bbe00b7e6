"""Parses `device_mapping`, the devices of a role, without executing it."""

from __future__ import annotations

import ast
import re
from collections import Counter
from typing import Any

MOST_DEVICES = 65_536
LONGEST_TEXT = 1000


def parse_devices(value: Any) -> list[int]:
    """Returns the device numbers in `value`.

    Accepts a list of integers, and as text `list(range(0,8))`, `range(8)`, `[0, 1, 2]`, sums of these,
    and ranges such as `0-7` or `0-3,6`. Raises ValueError for other values, for negative numbers, for a
    device named twice and for more than `MOST_DEVICES` devices (before it lists them).
    """
    if isinstance(value, bool) or not isinstance(value, int | str | list | tuple):
        raise ValueError(f"expected a list of device numbers, got {value!r}: write list(range(0,8))")
    if isinstance(value, int):
        devices = [value]
    elif isinstance(value, str):
        devices = _from_text(value.strip())
    else:
        devices = [_integer(item) for item in value]
    if not devices:
        raise ValueError(f"{value!r} names no device: write such as list(range(0,8))")
    if len(devices) > MOST_DEVICES:
        raise ValueError(f"names {len(devices):,} devices; a job has at most {MOST_DEVICES:,}: name fewer")
    negative = [device for device in devices if device < 0]
    if negative:
        raise ValueError(f"device numbers start at 0, got {negative[0]}")
    twice = sorted(device for device, times in Counter(devices).items() if times > 1)
    if twice:
        raise ValueError(f"device {twice[0]} is named twice: name it once")
    return devices


def _integer(item: Any) -> int:
    if isinstance(item, bool) or not isinstance(item, int):
        raise ValueError(f"device numbers are integers, got {item!r}")
    return item


def _from_text(text: str) -> list[int]:
    """Device numbers of ranges such as `0-3,6`, else of a Python expression."""
    if len(text) > LONGEST_TEXT:
        raise ValueError(f"{text[:40]!r}... has {len(text):,} characters; write ranges, such as '0-7'")
    if re.fullmatch(r"\d+(\s*-\s*\d+)?(\s*,\s*\d+(\s*-\s*\d+)?)*", text):
        devices: list[int] = []
        for part in text.split(","):
            first, _, last = part.partition("-")
            devices += _bounded_list(range(int(first), int(last or first) + 1), text)
        return devices
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(_unreadable(text)) from None
    return _from_node(tree.body, text)


def _from_node(node: ast.expr, text: str) -> list[int]:
    """Device numbers of a list, of `range` (alone or in `list`), or of a sum of these; `text` is for errors."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _from_node(node.left, text) + _from_node(node.right, text)
    if isinstance(node, ast.List | ast.Tuple):
        return [_number(item, text) for item in node.elts]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        if node.func.id == "list" and len(node.args) == 1:
            return _from_node(node.args[0], text)
        if node.func.id == "range" and 1 <= len(node.args) <= 3:
            bounds = [_number(argument, text) for argument in node.args]
            if len(bounds) == 3 and bounds[2] == 0:
                raise ValueError(f"the step of {text!r} is zero: write at least 1")
            return _bounded_list(range(*bounds), text)
    raise ValueError(_unreadable(text))


def _bounded_list(devices: range, text: str) -> list[int]:
    if len(devices[: MOST_DEVICES + 1]) > MOST_DEVICES:  # sliced: `len` of a huge range overflows
        raise ValueError(f"{text!r} names more than {MOST_DEVICES:,} devices: check its end")
    return list(devices)


def _number(node: ast.expr, text: str) -> int:
    sign = 1
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        sign, node = -1, node.operand
    if isinstance(node, ast.Constant) and isinstance(node.value, int) and not isinstance(node.value, bool):
        return sign * node.value
    raise ValueError(_unreadable(text))


def _unreadable(text: str) -> str:
    return f"cannot read {text!r}; write a list such as [0, 1], 'list(range(0,8))' or '0-7'"
