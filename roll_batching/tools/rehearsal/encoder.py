"""Runs transformers' vision encoder on fake tensors. It reads image sizes, which stay real tensors on the host."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter
from transformers import AttentionInterface
from transformers.vision_utils import get_vision_interpolation_indices_and_weights

from roll_batching.modeling import vision
from roll_batching.settings.model_parts import VisionConfig
from roll_batching.tools.rehearsal import fake_cuda

_ATTENTION = "rehearsed_windows"


def rehearse_encoders(device: str) -> None:
    """Build encoders for fake tensors on `device` ("cpu" or "cuda") until the process ends."""
    AttentionInterface.register(_ATTENTION, _attend)
    where = fake_cuda.DEVICE if device == "cuda" else torch.device("cpu")

    for name, encoder in vision.ENCODERS.items():
        vision.ENCODERS[name] = _rehearsed(encoder, where)


def _rehearsed(encoder: Any, where: torch.device) -> Any:
    """Class of a transformers encoder that runs on fake tensors; windows of equal length share one attention call."""

    class RehearsedEncoder(encoder):  # type: ignore[misc]
        def __init__(self, config: Any, settings: VisionConfig) -> None:
            config._attn_implementation = _ATTENTION
            with _NoDraws(), where:  # real weights would fill the host's memory
                super().__init__(config, settings)
            for name in {"rotary_pos_emb", "pos_embed"} & dict(self.named_children()).keys():
                self.get_submodule(name).register_forward_pre_hook(
                    lambda _, args: tuple(x.to(where) if isinstance(x, torch.Tensor) else x for x in args)
                )
            for number in range(settings.depth):
                attention = self.get_submodule(f"blocks.{number}.attn")
                attention.register_forward_pre_hook(_join_windows, with_kwargs=True)

        def forward(self, frames: torch.Tensor, grids: torch.Tensor) -> Any:
            positions = {}
            if hasattr(self, "pos_embed"):  # transformers would multiply weights on the host with embeddings
                indices, weights = get_vision_interpolation_indices_and_weights(
                    grids, self.num_grid_per_side, self.interpolation_mode, self.interpolation_align_corners,
                    self.config.spatial_merge_size,
                )  # fmt: skip
                positions = {"interp_indices": indices, "interp_weights": weights.to(where)}
            return super().forward(frames, grids, **positions)

        def encode(self, pixels: torch.Tensor, grids: torch.Tensor) -> list[torch.Tensor]:
            with _HostFactories():
                features: list[torch.Tensor] = super().encode(pixels, grids)
            return features

    return RehearsedEncoder


class _NoDraws(TorchDispatchMode):
    """Leaves weights as allocated: a fake device draws no numbers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and func._schema.is_mutable:
            return args[0]
        return func(*args, **(kwargs or {}))


class _HostFactories(TorchDispatchMode):
    """Makes real tensors on the host: the encoder computes indices of patches there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if device is None or torch.device(device).type == "cpu":
            if not any(isinstance(value, torch.Tensor) for value in tree_iter((args, kwargs))):
                with _disable_current_modes():
                    return func(*args, **kwargs)
        return func(*args, **kwargs)


def _join_windows(attention: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Hook: joins all windows of equal length. Memory and FLOPs stay; thousands of calls per layer become a few."""
    lengths, counts = kwargs["cu_seqlens"].diff().unique(return_counts=True)
    attention.rehearsed_lengths = iter(lengths.tolist())
    ends = (lengths * counts).cumsum(0)
    return args, {**kwargs, "cu_seqlens": torch.cat([ends.new_zeros(1), ends])}


def _attend(
    attention: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *args: Any,
    scaling: float,
    **named: Any,
) -> tuple[torch.Tensor, None]:
    """Attention for transformers' interface over joined windows of one length: [1, heads, patches, channels]."""
    length = next(attention.rehearsed_lengths)
    q, k, v = (states[0].unflatten(1, (-1, length)).transpose(0, 1) for states in (query, key, value))
    attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scaling)
    return attended.transpose(1, 2).flatten(0, 1)[None].contiguous(), None
