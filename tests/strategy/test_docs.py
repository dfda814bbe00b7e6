"""Names that the pages for people coming from elsewhere promise: each can be imported."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SEED_NAMES = [
    "batch_balance",
    "make_micro_batch_iter_for_sequence_packing",
    "_pack_sequences",
    "_unpack_sequences",
    "loss_wrapper",
    "adjust_sequence_length",
    "apply_loss_scale",
    "cu_seqlens_padded",
    "PackedSeqParams",
]


def _rows(page: str) -> list[list[str]]:
    lines = (ROOT / "docs" / page).read_text().split("\n## Functions")[-1].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return [row for row in rows if len(row) == 3 and row[1] != "here"]


def _resolve(name: str) -> Any:
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(name)


def test_every_name_on_the_right_of_the_roll_page_exists() -> None:
    rows = _rows("roll.md")
    assert len(rows) > 20
    for row in rows:
        names = re.findall(r"`(roll_batching[\w.]+)`", f"{row[1]} {row[2]}")
        assert names, row
        for name in names:
            assert _resolve(name) is not None


@pytest.mark.parametrize("name", SEED_NAMES)
def test_the_roll_page_maps_every_name_of_the_seeds(name: str) -> None:
    assert any(f"`{name}`" in row[0] for row in _rows("roll.md"))
