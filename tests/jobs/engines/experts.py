"""Experts that the test servers return: other ones than a router would choose, by place, token and layer."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np


def routed_experts(tokens: list[int], layers: int, top_k: int, num_experts: int) -> np.ndarray:
    """Experts of all tokens but the last: int64 `[tokens - 1, layers, top_k]`."""
    place, layer, choice = np.ogrid[: len(tokens) - 1, :layers, :top_k]
    token = np.array(tokens[:-1])[:, None, None]
    return (token + place + layer + choice) % num_experts


def routed_text(model: Any, tokens: list[int], fault: str, *, npy: bool) -> Any:
    """The same in a reply: base64 of int32, or of an .npy file of uint8."""
    config = model.model.config
    experts = routed_experts(tokens, config.num_hidden_layers, config.num_experts_per_tok, config.num_experts)
    if fault == "experts_cut":
        experts = experts[:-1]
    if fault == "experts_zero":
        experts = experts * 0
    if fault == "experts_high":
        experts = np.where(experts == 0, config.num_experts, experts)
    if fault == "experts_text":
        return "no base64"
    if not npy:
        return base64.b64encode(experts.astype("<i4").tobytes()).decode()
    file = io.BytesIO()
    np.save(file, experts.astype(np.uint8))
    return base64.b64encode(file.getvalue()).decode()
