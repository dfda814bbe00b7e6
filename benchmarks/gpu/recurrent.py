"""Gated delta nets on a GPU: kernels of flash-linear-attention beside plain torch, over a pack and over trees."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from roll_batching.modeling.delta_kernels import Rule, kernel, kernel_rule
from roll_batching.modeling.recurrences import Chunks, gated_delta_rule, unit_length
from roll_batching.modeling.recurrent_packs import whole_pack
from roll_batching.packing.pack_layout import PackLayout

LIMIT = 3e-2
"""Largest relative error of outputs and gradients: bf16 products of keys and states."""


def layouts(tokens: int) -> dict[str, PackLayout]:
    """A pack of unequal sequences, and a prompt of half the tokens with eight answers."""
    lengths = np.array([tokens // 2, tokens // 4, tokens // 8, tokens // 8])
    answers = np.array([tokens // 2 + tokens // 16, *[tokens // 16] * 7])
    prefixes = np.array([0, *[tokens // 2] * 7])
    return {
        "a pack": PackLayout(lengths=lengths, segments=lengths, cp_size=1),
        "a prompt with eight answers": PackLayout(
            lengths=answers, segments=answers, cp_size=1, prefix_lengths=prefixes
        ),
    }


def run(device: str, dry: bool) -> Iterator[dict[str, Any]]:
    """Errors and milliseconds of both, forward and backward; without fla, of plain torch alone."""
    place, (tokens, heads, channels) = torch.device(device), (512, 2, 16) if dry else (8192, 32, 128)
    draw = torch.Generator().manual_seed(1)
    for name, layout in layouts(tokens).items():
        chunks = whole_pack(layout, 3, place)
        shapes = [(layout.tokens, heads, channels)] * 3 + [(layout.tokens, heads)] * 2
        query, key, value, decay, rate = (torch.randn(shape, generator=draw).to(place) for shape in shapes)
        inputs = [unit_length(query) * channels**-0.5, unit_length(key), value, -decay.abs() * 0.03, rate.sigmoid()]
        leaves = [x.requires_grad_() for x in inputs]
        figures, limits = {}, {}
        expected, figures["torch_ms"] = _measured(gated_delta_rule, leaves, chunks, place)
        if kernel() is not None and place.type == "cuda":
            rule = functools.partial(kernel_rule, dtype=torch.bfloat16)
            found, figures["kernels_ms"] = _measured(rule, leaves, chunks, place)
            pairs = zip(found, expected, strict=True)
            error = max(float((one - other).norm() / other.norm()) for one, other in pairs)
            figures["error"], limits["error"] = error, [error, LIMIT]
        yield {"case": name, "figures": figures, "limits": limits, "notes": {"fla": kernel() is not None}}


def _measured(
    rule: Rule, leaves: list[torch.Tensor], chunks: Chunks, device: torch.device
) -> tuple[list[torch.Tensor], float]:
    """Outputs and gradients, and the shortest milliseconds of five passes after one."""
    seconds = []
    for _ in range(6):
        start = _now(device)
        out = rule(*leaves, chunks)[0].float()
        gradients = torch.autograd.grad(out.square().sum(), leaves)
        seconds.append(_now(device) - start)
    return [out.detach(), *gradients], 1e3 * min(seconds[1:])


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
