"""Abuses of model directories whose layers have one part each (Nemotron-H)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.campaigns.abuse.directories import (
    FROM_MODEL,
    edited_json,
    models,
    nothing_written,
    truncated,
    without_tensors,
)
from tests.campaigns.abuse.runner import FAILED, REFUSED, Abuse

MISSING = ("backbone.layers.0.mixer.A_log", "model.layers.0.mixer.A_log")


def _broken(name: str, change: Callable[[Path], object], *words: str, code: int = FAILED) -> Abuse:
    return Abuse(
        name=f"hybrid: {name}",
        code=code,
        settings=FROM_MODEL,
        words=words,
        lines=1 if code == FAILED else 3,
        scene=models(change, left=nothing_written, model="nemotron_h"),
    )


HYBRIDS = [
    _broken("a truncated file", truncated(), "model.safetensors cannot be read"),
    _broken("a tensor that is missing", without_tensors(MISSING), "layers.0.mixer.A_log is missing"),
    _broken(
        "a pattern of another length",
        edited_json("model/config.json", num_hidden_layers=9),
        "num_hidden_layers: 9 contradicts the 8 layers",
        code=REFUSED,
    ),
    _broken(
        "a pattern with an unknown letter",
        edited_json("model/config.json", hybrid_override_pattern="M-*-M*MX", layers_block_type=None),
        "hybrid_override_pattern",
        code=REFUSED,
    ),
]
