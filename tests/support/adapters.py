"""LoRA by plain torch: stock Megatron weights plus the product of two matrices, differentiated by autograd."""

from __future__ import annotations

import zlib
from typing import Any

import torch

RANK, ALPHA = 4, 6.0
PARTS = {
    "self_attention.linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "self_attention.linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
ALL = tuple(part for parts in PARTS.values() for part in parts)


class PlainLora:
    """A stock model whose weights are `W + ALPHA / RANK * B A`; calling it computes with the current A and B."""

    def __init__(self, model: Any, targets: tuple[str, ...] = ALL) -> None:
        self.model, self.on = model, True
        self.matrices: dict[str, torch.Tensor] = {}
        self._layers: dict[str, tuple[str, ...]] = {}
        for name, weight in model.named_parameters():
            path = name.removesuffix(".weight")
            parts = next((parts for kind, parts in PARTS.items() if path.endswith(kind)), ())
            for part, rows in zip(parts, self._rows(parts, weight), strict=True):
                if part in targets:
                    self._layers[path] = parts
                    self._add(f"{path}.adapter.{part}_a", RANK, weight.shape[1])
                    self._add(f"{path}.adapter.{part}_b", rows, RANK)

    def _rows(self, parts: tuple[str, ...], weight: torch.Tensor) -> list[int]:
        config = self.model.config
        if not parts:
            return []
        if len(parts) == 3:
            heads = (config.num_attention_heads, config.num_query_groups, config.num_query_groups)
            return [number * config.kv_channels for number in heads]
        return [weight.shape[0] // len(parts)] * len(parts)

    def _add(self, name: str, *shape: int) -> None:
        g = torch.Generator().manual_seed(zlib.crc32(name.encode()))  # as `models.fill`
        self.matrices[name] = (torch.randn(shape, generator=g) * 0.15).requires_grad_()

    def weights(self) -> dict[str, torch.Tensor]:
        """The merged weights of the adapted layers, by name."""
        weights = dict(self.model.named_parameters())
        return {f"{p}.weight": weights[f"{p}.weight"].detach() + self._delta(p) for p in self._layers}

    def _delta(self, path: str) -> torch.Tensor:
        config, rows = self.model.config, []
        products = {}
        for part in self._layers[path]:
            if f"{path}.adapter.{part}_a" in self.matrices:
                a, b = (self.matrices[f"{path}.adapter.{part}_{side}"] for side in "ab")
                products[part] = ALPHA / RANK * (b @ a)
        like = next(iter(products.values()))
        if len(self._layers[path]) == 3:
            width, per_group = config.kv_channels, config.num_attention_heads // config.num_query_groups
            for group in range(config.num_query_groups):
                for part, heads in (("q_proj", per_group), ("k_proj", 1), ("v_proj", 1)):
                    for head in range(group * heads, (group + 1) * heads):
                        zeros = like.new_zeros(width, like.shape[1])
                        rows.append(products[part][head * width : (head + 1) * width] if part in products else zeros)
            return torch.cat(rows)
        return torch.cat([products.get(part, torch.zeros_like(like)) for part in self._layers[path]])

    def __call__(self, *arguments: Any) -> torch.Tensor:
        """Logits."""
        weights = self.weights() if self.on else {}
        logits: torch.Tensor = torch.func.functional_call(self.model, weights, arguments)
        return logits


def adapter_values(chunks: list[Any], tp_rank: int) -> dict[str, Any]:
    """The adapters of the whole model by global name, on every rank. Collective."""
    import torch.distributed as dist

    from roll_batching.modeling.head import gpt_of
    from tests.support.models import _partition, global_name, join_gradients

    local: dict[str, list[Any]] = {}
    for gpt in map(gpt_of, chunks):
        for name, parameter in gpt.named_parameters():
            if ".adapter." in name:
                key = global_name(gpt, name)
                entry = (*_partition(gpt, key, parameter), tp_rank, parameter.detach().clone())
                local.setdefault(key, []).append(entry)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, local)
    return join_gradients(everyone, 61)
