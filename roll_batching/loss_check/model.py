"""The tiny model of the check: weights and gradients that are comparable between layouts."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from roll_batching.modeling.head import gpt_of
from roll_batching.settings import RoleSettings

ARCHITECTURE = {
    "hidden_size": 32,
    "num_layers": 2,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 48,
}


def role_settings(
    mode: str, layout: dict[str, Any], *, vocabulary: int, samples: int, tokens: int, value_head: bool
) -> RoleSettings:
    """Settings of a role that takes any plan of `samples` with `tokens` in all."""
    cap = 2 * tokens + 64 * samples  # with room for every alignment
    batching: dict[str, Any] = {"padded_length": "longest"}
    if mode == "packed":
        caps = {f"max_packed_sequence_length_{kind}": cap for kind in ("train", "forward")}
        batching = {"use_sequence_packing": True, "sequence_packing_args": caps}
    return RoleSettings.model_validate(
        {
            "model_args": {
                "architecture": {**ARCHITECTURE, "vocab_size": vocabulary, "max_position_embeddings": cap},
                "dtype": "fp32",
                "value_head": value_head,
            },
            "training_args": {"per_device_train_batch_size": samples, "max_grad_norm": 0.0},
            "strategy_args": {"strategy_name": "megatron_train", "strategy_config": layout},
            "backend_timeout": 0.5,
            **batching,
        }
    )


def _split(name: str, parameter: Any) -> tuple[int | None, int]:
    """(dimension that tensor parallelism splits, or None; parts that it splits each, two in the gated layer)."""
    is_split = getattr(parameter, "tensor_model_parallel", False)
    return parameter.partition_dim if is_split else None, 2 if "linear_fc1" in name else 1


@torch.no_grad()
def fill_weights(chunks: Sequence[Any], vocabulary: int, tp_rank: int, tp_size: int) -> None:
    """Draws every weight by its name, equal in every layout; rows of padded tokens are large, as none may matter."""
    for name, parameter in _parameters(chunks):
        dim, parts = _split(name, parameter)
        shape = [n * tp_size if i == dim else n for i, n in enumerate(parameter.shape)]
        g = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        rows = vocabulary if _of_vocabulary(name) and shape[0] > 1 else shape[0]  # 1: a value head
        whole = torch.full(shape, 3.0)
        whole[:rows] = torch.randn(rows, *shape[1:], generator=g) * 0.15 + (1.0 if "norm" in name else 0.0)
        if dim is not None:
            whole = torch.cat([part.chunk(tp_size, dim)[tp_rank] for part in whole.chunk(parts, dim)], dim)
        parameter.copy_(whole)


def whole_gradients(chunks: Sequence[Any], vocabulary: int, tp_group: Any) -> dict[str, torch.Tensor]:
    """Gradients of the whole model by name, without padded tokens, on the host. Collective over `tp_group`."""
    gradients = {}
    for name, parameter in _parameters(chunks):
        dim, parts = _split(name, parameter)
        local = parameter.main_grad.detach().float().cpu()
        if dim is not None:
            shards = [torch.empty_like(local) for _ in range(tp_group.size())]
            dist.all_gather(shards, local.contiguous(), group=tp_group)
            pieces = [shard.chunk(parts, dim) for shard in shards]
            local = torch.cat([piece[part] for part in range(parts) for piece in pieces], dim)
        gradients[name] = local[:vocabulary].clone() if _of_vocabulary(name) else local.clone()
    return gradients


def _parameters(chunks: Sequence[Any]) -> list[tuple[str, Any]]:
    return [entry for chunk in chunks for entry in gpt_of(chunk).named_parameters()]


def _of_vocabulary(name: str) -> bool:
    return "word_embeddings" in name or "output_layer" in name
