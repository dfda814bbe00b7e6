"""One set of global weights and fields for every layout, and the way back from shards to whole gradients."""

from __future__ import annotations

import zlib
from typing import Any

import torch
import torch.distributed as dist

from roll_batching.jobs.config import WorkerConfig
from roll_batching.modeling.head import gpt_of
from roll_batching.samples import SampleBatch

ARCHITECTURE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_layers": 2,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 48,
    "norm_epsilon": 1e-5,
    "max_position_embeddings": 512,
}

MODES = ("padded", "dynamic", "packed")


def worker_config(
    mode: str,
    cap: int,
    *,
    architecture: dict[str, Any] | None = None,
    megatron: dict[str, Any] | None = None,
    training: dict[str, Any] | None = None,
    dtype: str = "auto",
    **settings: Any,
) -> WorkerConfig:
    """A training role in one of the three modes, without clipping, so that gradients stay as they are."""
    layout = megatron or {}
    unit = layout.get("tensor_model_parallel_size", 1) * layout.get("context_parallel_size", 1)
    batching: dict[str, dict[str, Any]] = {
        "packed": {
            "use_sequence_packing": True,
            "sequence_packing_args": {
                "algorithm": "load_balance",
                "max_packed_sequence_length_train": cap,
                "max_packed_sequence_length_forward": cap,
            },
        },
        "dynamic": {
            "use_dynamic_batching": True,
            "max_tokens_per_microbatch_in_train": cap,
            "max_tokens_per_microbatch_in_infer": cap,
            "sequence_length_round_in_train": 2 * unit,
            "sequence_length_round_in_infer": 2 * unit,
        },
        "padded": {"padded_length": "longest", "infer_batch_size": 3},
    }
    defaults = {"learning_rate": 1e-3, "max_grad_norm": 0.0, "per_device_train_batch_size": 3}
    return WorkerConfig.model_validate(
        {
            "model_args": {"architecture": architecture or ARCHITECTURE, "dtype": dtype},
            "training_args": {**defaults, **(training or {})},
            "strategy_args": {"strategy_name": "megatron_train", "strategy_config": layout},
            **batching[mode],
            **settings,
        }
    )


def random_batch(seed: int, count: int, longest: int, vocab_size: int = 61) -> SampleBatch:
    """Samples of random lengths, the first of length 1 and the second of `longest`, with the fields of a PPO step."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=g).tolist()
    lengths[0] = 1
    if count > 1:
        lengths[1] = longest
    order = torch.randperm(count, generator=g).tolist()
    lengths = [lengths[i] for i in order]

    def rows(make: Any) -> list[torch.Tensor]:
        return [make(n) for n in lengths]

    return SampleBatch.from_lists(
        {
            "input_ids": rows(lambda n: torch.randint(0, vocab_size, (n,), generator=g)),
            "response_mask": rows(lambda n: torch.rand(n, generator=g) < 0.7),
            "advantages": torch.randn(count, generator=g),
            "old_log_probs": rows(lambda n: -4.1 + 0.3 * torch.randn(n, generator=g)),
            "ref_log_probs": rows(lambda n: -4.1 + 0.3 * torch.randn(n, generator=g)),
        },
        {
            "input_ids": "token",
            "response_mask": "token",
            "advantages": "sample",
            "old_log_probs": "next_token",
            "ref_log_probs": "next_token",
        },
        ids=[1000 + 7 * i for i in range(count)],
    )


# ---- weights and gradients by global name


def global_name(gpt: Any, name: str) -> str:
    """A parameter's name in the whole model: layers numbered over all stages, the tied head as the embedding.

    Norms have the names of local layers also where they are part of TransformerEngine's linear layers.
    """
    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"]:
        parts[2] = str(gpt.decoder.layers[int(parts[2])].layer_number - 1)
    if "local_experts" in parts:
        at = parts.index("local_experts") + 1
        mine = gpt.config.num_moe_experts // gpt.config.expert_model_parallel_size
        parts[at] = str(int(parts[at]) + mine * gpt.pg_collection.ep.rank())
    name = ".".join(parts)
    for fused, own in (("self_attention.linear_qkv", "input_layernorm"), ("mlp.linear_fc1", "pre_mlp_layernorm")):
        name = name.replace(f"{fused}.layer_norm_weight", f"{own}.weight")
    if gpt.share_embeddings_and_output_weights and name == "output_layer.weight":
        return "embedding.word_embeddings.weight"
    return name


def _partition(gpt: Any, name: str, parameter: Any) -> tuple[int | None, int]:
    """(split dimension or None, blocks that are split each by itself: the gated layer holds two)."""
    split = parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None
    is_gated = gpt.config.gated_linear_unit and "linear_fc1" in name and ".adapter." not in name
    return split, 2 if is_gated else 1


def _is_vocabulary(name: str) -> bool:
    return "word_embeddings" in name or "output_layer" in name


@torch.no_grad()
def fill(chunks: list[Any], vocab_size: int, tp_rank: int = 0, tp_size: int = 1) -> None:
    """Gives every parameter the values that its global name stands for, in any layout."""
    for chunk in chunks:
        gpt = gpt_of(chunk)
        for local, parameter in gpt.named_parameters():
            name = global_name(gpt, local)
            dim, blocks = _partition(gpt, name, parameter)
            shape = [n * tp_size if i == dim else n for i, n in enumerate(parameter.shape)]
            padded = shape[0] - vocab_size if _is_vocabulary(name) and shape[0] > 1 else 0  # 1: a value head
            shape[0] -= padded
            g = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            full = torch.randn(shape, generator=g) * 0.15 + (1.0 if "norm" in name else 0.0)
            if padded:  # columns that stand for no token must not matter: large values would show it
                full = torch.cat([full, torch.full([padded, *shape[1:]], 3.0)])
            if dim is not None:
                full = torch.cat([b.chunk(tp_size, dim)[tp_rank] for b in full.chunk(blocks, dim)], dim)
            parameter.copy_(full)


def whole_gradients(chunks: list[Any], vocab_size: int, tp_rank: int, distributed_optimizer: bool) -> dict[str, Any]:
    """Every gradient of the whole model by global name, at least in fp32, on every rank; replicas must agree.

    A collective call. Under "spread" it holds the largest difference between replicas of a gradient.
    """
    local: dict[str, list[Any]] = {}
    for chunk in chunks:
        if distributed_optimizer:  # each rank holds only its shard of the reduced gradient
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                for bucket in buffer.buckets:
                    group = buffer.data_parallel_group
                    parts = list(bucket.grad_data.chunk(group.size()))
                    mine = parts[group.rank()].clone()
                    dist.all_gather(parts, mine, group=group)
        gpt = gpt_of(chunk)
        for name, parameter in gpt.named_parameters():
            if not parameter.requires_grad:
                continue
            key = global_name(gpt, name)
            wide = torch.promote_types(parameter.main_grad.dtype, torch.float32)
            entry = (*_partition(gpt, key, parameter), tp_rank, parameter.main_grad.to(wide, copy=True))
            local.setdefault(key, []).append(entry)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, local)
    return join_gradients(everyone, vocab_size)


def join_gradients(everyone: list[dict[str, list[Any]]], vocab_size: int) -> dict[str, Any]:
    """Shards of all ranks, put together by global name."""
    whole: dict[str, Any] = {}
    spread = 0.0
    for name in {n for one in everyone for n in one}:
        found = [entry for one in everyone for entry in one.get(name, [])]
        dim, blocks = found[0][0], found[0][1]
        shards: dict[int, torch.Tensor] = {}
        for _, _, rank, gradient in found:
            key = rank if dim is not None else 0
            if key in shards:
                scale = shards[key].norm().clamp(min=1e-12)
                spread = max(spread, float((shards[key] - gradient).norm() / scale))
            else:
                shards[key] = gradient
        ordered = [shards[rank] for rank in sorted(shards)]
        if dim is None:
            full = ordered[0]
        else:
            blocks_of = [s.chunk(blocks, dim) for s in ordered]
            full = torch.cat([torch.cat([b[i] for b in blocks_of], dim) for i in range(blocks)], dim)
        whole[name] = full[:vocab_size] if _is_vocabulary(name) else full
    whole["spread"] = spread
    return whole


def worst_difference(found: dict[str, Any], expected: dict[str, Any]) -> tuple[float, str]:
    """Largest norm of a difference over the norm of the expected gradient, and the parameter's name."""
    names = set(expected) - {"spread"}
    if names != set(found) - {"spread"}:
        raise AssertionError(f"parameters differ: {sorted(names ^ (set(found) - {'spread'}))}")
    gaps = {n: float((found[n] - expected[n]).norm() / expected[n].norm().clamp(min=1e-12)) for n in names}
    worst = max(gaps, key=lambda n: gaps[n])
    return gaps[worst], worst
