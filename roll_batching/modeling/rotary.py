"""Rotary position embedding (RoPE) from the positions of a pack: vectorised, without device sync, correct under CP.

Megatron's unfused RoPE for packed sequences synchronises the device and loops over sequences in every layer. Here the
tables are computed once per forward pass, from the position of each local token, and the attention core rotates queries
and keys. Bitwise equal to Megatron's RoPE, except on CUDA, where a kernel rotates in fp32 and rounds once.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge

from roll_batching.checked_fields import CheckedFields, Count, OptionalPositive, Positive, PositiveShare
from roll_batching.errors import LayoutError
from roll_batching.registry import module_with
from roll_batching.settings import ArchitectureConfig

Tables = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class RotarySettings(CheckedFields, error=LayoutError):
    """Base, share of rotated channels and scaling of RoPE.

    `scaling` is None, "linear" (positions divided by `factor`, Chen et al. 2023, arXiv 2306.15595), "llama3" (frequency
    bands, Llama 3.1) or "yarn" (a ramp over channels, Peng et al. 2023, arXiv 2309.00071); the remaining fields are
    their parameters.
    """

    base: Positive = 10000.0
    percent: PositiveShare = 1.0
    interleaved: bool = False
    """Whether channels 2i and 2i + 1 turn together, instead of i and i + rotated / 2. The rotated queries and keys then
    have the even channels before the odd ones, which no product of them notices."""
    scaling: Literal["linear", "llama3", "yarn"] | None = None
    factor: Annotated[float, Ge(1)] = 1.0
    low_freq_factor: Positive = 1.0
    high_freq_factor: Positive = 4.0
    original_max_position_embeddings: Count = 8192
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    truncate: bool = True
    rotated_factor: Positive = 1.0
    """Factor of rotated queries and keys."""
    local_base: OptionalPositive = None
    """Base of layers with a sliding window, whose frequencies are not scaled; None: as in other layers."""
    sections: tuple[int, ...] | None = None
    """Pairs of rotated channels by the axis of their position (M-RoPE, arXiv 2409.12191); None: positions have one."""
    alternating: bool = False
    """Whether the axes of `sections` take turns along the channels, as long as they have pairs (Qwen3-VL)."""

    @property
    def of_windows(self) -> RotarySettings:
        """RoPE of the layers with a sliding window."""
        if self.local_base is None:
            return self
        return RotarySettings(base=self.local_base, percent=self.percent, interleaved=self.interleaved)

    def inverse_frequencies(self, head_dim: int) -> torch.Tensor:
        """Inverse frequencies [rotated / 2], fp32 on the CPU; rotated = head_dim * percent."""
        rotated = int(head_dim * self.percent)
        frequencies = 1.0 / self.base ** (torch.arange(0, rotated, 2, dtype=torch.float32) / rotated)
        if self.scaling == "yarn":
            return self._yarn_frequencies(frequencies, rotated)
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

    def _yarn_frequencies(self, frequencies: torch.Tensor, rotated: int) -> torch.Tensor:
        """Slow channels are divided by `factor`, fast ones stay, and a linear ramp lies between them."""

        def channel(turns: float) -> float:
            """The channel that turns so often over the original length."""
            length = self.original_max_position_embeddings / (turns * 2 * math.pi)
            return rotated * math.log(length) / (2 * math.log(self.base))

        low, high = channel(self.beta_fast), channel(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rotated - 1)
        high += 0.001 if low == high else 0.0  # as in transformers: no division by zero
        ramp = ((torch.arange(rotated // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
        return frequencies / self.factor * ramp + frequencies * (1 - ramp)

    def tables(self, positions: torch.Tensor, inverse_frequencies: torch.Tensor) -> Tables:
        """The tables (cos, sin), each [*positions.shape, rotated] fp32; with `sections` from [axes, ...]."""
        position = positions.to(inverse_frequencies.dtype)[..., None]
        if self.sections is not None:
            first, *others = position
            position = first.repeat(*[1] * (first.dim() - 1), sum(self.sections))
            for axis, values in enumerate(others, 1):
                before, pairs = sum(self.sections[:axis]), self.sections[axis]
                turns = slice(axis, 3 * pairs, 3) if self.alternating else slice(before, before + pairs)
                position[..., turns] = values
        if self.scaling == "linear":
            position = position * (1 / self.factor)
        angles = position * inverse_frequencies
        angles = torch.cat([angles, angles], -1)
        if self.rotated_factor == 1:
            return angles.cos(), angles.sin()
        return angles.cos() * self.rotated_factor, angles.sin() * self.rotated_factor


def rotate(x: torch.Tensor, tables: Tables) -> torch.Tensor:
    """Rotates the first `rotated` channels of x [..., heads, head_dim] by tables [..., rotated]."""
    if x.device.type == "cuda" and x.dtype is not torch.float64:
        kernel = module_with("triton", "roll_batching.modeling.rotary_kernel")
        if kernel is not None:
            return kernel.rotate_fused(x, tables)
    cos, sin = (table.unsqueeze(-2).to(x.dtype) for table in tables)
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turned.chunk(2, -1)
    turned = turned * cos + torch.cat([-second, first], -1) * sin
    return turned if rest.shape[-1] == 0 else torch.cat([turned, rest], -1)


class PackRotation:
    """RoPE on the queries and keys of a forward pass; a `packing.attention_backend.Rotation`.

    The first layer computes the tables and stores them in the pass's params for other layers with the same RoPE.
    """

    def __init__(self, settings: RotarySettings, head_dim: int) -> None:
        self.settings = settings
        # Not a module buffer: that would add a state-dict key, and Float16Module would cast it.
        self._inverse_frequencies = settings.inverse_frequencies(head_dim)

    def __call__(self, query: torch.Tensor, key: torch.Tensor, params: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated (query, key). `params` are PackedParams or DecodeParams, with `positions` and `rotary`."""
        cached = params.rotary
        if cached is None:
            cached = params.rotary = {}
        if self.settings not in cached:
            if self._inverse_frequencies.device != query.device:
                self._inverse_frequencies = self._inverse_frequencies.to(query.device)
            positions = params.positions
            if self.settings.sections is not None:  # without images a token has the same position on all axes
                equal = positions.expand(len(self.settings.sections), *positions.shape)
                positions = equal if params.axes is None else params.axes
            cos, sin = self.settings.tables(positions, self._inverse_frequencies)
            # Cast once: every layer saves them for its backward.
            cached[self.settings] = cos.to(query.dtype), sin.to(query.dtype)
        tables: Tables = cached[self.settings]
        if self.settings.interleaved:
            rotated = tables[0].shape[-1]  # even channels before odd ones, as `rotate` pairs halves
            query, key = (
                torch.cat([x[..., 0:rotated:2], x[..., 1:rotated:2], x[..., rotated:]], -1) for x in (query, key)
            )
        return rotate(query, tables), rotate(key, tables)


def rotary_settings(architecture: ArchitectureConfig) -> RotarySettings:
    """The architecture's RoPE settings, scaling included."""
    latent = architecture.multi_latent_attention
    settings = RotarySettings(
        base=architecture.rotary_base,
        percent=architecture.rotary_percent,
        interleaved=latent is not None and latent.rotary_interleaved,
        local_base=architecture.rotary_local_base,
        sections=None if architecture.vision is None else architecture.vision.mrope_section,
        alternating=architecture.vision is not None and architecture.vision.mrope_interleaved,
    )
    scaling = architecture.rope_scaling
    if scaling is None:
        return settings
    return dataclasses.replace(
        settings,
        scaling=scaling.type,
        factor=scaling.factor,
        low_freq_factor=scaling.low_freq_factor,
        high_freq_factor=scaling.high_freq_factor,
        original_max_position_embeddings=scaling.original_max_position_embeddings,
        beta_fast=scaling.beta_fast,
        beta_slow=scaling.beta_slow,
        truncate=scaling.truncate,
        rotated_factor=scaling.rotated_factor,
    )


def megatron_rotation(rotary: RotarySettings) -> dict[str, Any]:
    """GPTModel's arguments for RoPE in the model, for attention cores that do not rotate.

    Raises `LayoutError` for YaRN, for another base of layers with windows, and for llama3 scaling with other parameters
    than those that Megatron hard-codes.
    """
    options: dict[str, Any] = {
        "position_embedding_type": "rope",
        "rotary_base": rotary.base,
        "rotary_percent": rotary.percent,
    }
    if rotary.scaling == "yarn":
        raise LayoutError(
            "before Megatron-Core 0.20 its fused rotation of packs ignores YaRN's factor: choose an attention_backend "
            "that rotates (dense, varlen or flash_attn)"
        )
    if rotary.local_base is not None:
        raise LayoutError(
            "Megatron rotates all layers by one base, and layers with a sliding window have another one here "
            "(rotary_local_base): choose an attention_backend that rotates (dense, varlen or flash_attn)"
        )
    if rotary.scaling == "linear":
        options["seq_len_interpolation_factor"] = rotary.factor
    if rotary.scaling == "llama3":
        fixed = RotarySettings(base=rotary.base, percent=rotary.percent, scaling="llama3", factor=rotary.factor)
        if rotary != fixed:
            raise LayoutError(
                "Megatron hard-codes llama3 scaling with low_freq_factor=1, high_freq_factor=4 and "
                "original_max_position_embeddings=8192: set these values, or choose an attention_backend that rotates "
                "(dense, varlen or flash_attn)"
            )
        options |= {"rope_scaling": True, "rope_scaling_factor": rotary.factor}
    return options
