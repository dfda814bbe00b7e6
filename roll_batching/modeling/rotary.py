"""Rotary position embedding from the plan's positions: vectorised, no device sync, right under CP.

Megatron's unfused rotation of packed sequences synchronises the device and loops over sequences in
every layer. Here the tables come from the position of each local row, once per forward pass, and
queries and keys are rotated inside the attention core. Equal to Megatron's own rotation bit by bit, except on CUDA,
where one kernel rotates in fp32 and rounds once.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
from dataclasses import dataclass
from typing import Any

import torch

from roll_batching.errors import LayoutError

Tables = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class RotarySettings:
    """How positions become angles.

    `scaling` is None, "linear" (positions divided by `factor`, Chen et al. 2023, arXiv 2306.15595) or
    "llama3" (frequency bands, Llama 3.1; the remaining fields are its parameters).
    """

    base: float = 10000.0
    percent: float = 1.0
    scaling: str | None = None
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        if self.scaling not in (None, "linear", "llama3"):
            raise LayoutError(f"RoPE scaling {self.scaling!r} is not supported: use linear, llama3 or leave it out")

    def inverse_frequencies(self, head_dim: int) -> torch.Tensor:
        """[rotated / 2] fp32 on the CPU; `rotated` = head_dim * percent."""
        rotated = int(head_dim * self.percent)
        frequencies = 1.0 / self.base ** (torch.arange(0, rotated, 2, dtype=torch.float32) / rotated)
        if self.scaling != "llama3":
            return frequencies
        wavelength = 2 * math.pi / frequencies
        low = self.original_max_position_embeddings / self.low_freq_factor
        high = self.original_max_position_embeddings / self.high_freq_factor
        slow = torch.where(wavelength > low, frequencies / self.factor, frequencies)
        blend = (self.original_max_position_embeddings / wavelength - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        between = (1 - blend) * slow / self.factor + blend * slow
        middle = (wavelength >= high) & (wavelength <= low)
        return torch.where(middle, between, slow)

    def tables(self, positions: torch.Tensor, inverse_frequencies: torch.Tensor) -> Tables:
        """(cos, sin), each [*positions.shape, rotated] fp32."""
        at = positions.to(inverse_frequencies.dtype)
        if self.scaling == "linear":
            at = at * (1 / self.factor)
        angles = at[..., None] * inverse_frequencies
        angles = torch.cat([angles, angles], -1)
        return angles.cos(), angles.sin()


@functools.cache
def _kernel() -> Any:
    """The module with the kernel; None where triton is not installed."""
    found = importlib.util.find_spec("triton")
    return None if found is None else importlib.import_module("roll_batching.modeling.rotary_kernel")


def rotate(x: torch.Tensor, tables: Tables) -> torch.Tensor:
    """Rotates the first `rotated` channels of x [..., heads, head_dim] by tables [..., rotated]."""
    if x.device.type == "cuda" and x.dtype is not torch.float64 and (kernel := _kernel()) is not None:
        return kernel.rotate_in_one(x, tables)
    cos, sin = (table.unsqueeze(-2).to(x.dtype) for table in tables)
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turned.chunk(2, -1)
    turned = turned * cos + torch.cat([-second, first], -1) * sin
    return turned if rest.shape[-1] == 0 else torch.cat([turned, rest], -1)


class PackRotation:
    """Rotates queries and keys of a pass by its positions; a `packing.attention_backend.Rotation`.

    The first layer of a pass makes the tables and leaves them with the pass's params, where the others find them.
    """

    def __init__(self, settings: RotarySettings, head_dim: int) -> None:
        self.settings = settings
        # No buffer of a module: that would add a state-dict key and be cast by Float16Module.
        self._inverse_frequencies = settings.inverse_frequencies(head_dim)

    def __call__(self, query: torch.Tensor, key: torch.Tensor, params: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """`params` has `positions` and `rotary` (PackedParams, DecodeParams)."""
        if params.rotary is None:
            if self._inverse_frequencies.device != query.device:
                self._inverse_frequencies = self._inverse_frequencies.to(query.device)
            cos, sin = self.settings.tables(params.positions, self._inverse_frequencies)
            params.rotary = cos.to(query.dtype), sin.to(query.dtype)  # once: every layer keeps them for its backward
        tables: Tables = params.rotary
        return rotate(query, tables), rotate(key, tables)
