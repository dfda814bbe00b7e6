"""Models as a user of Megatron builds them: plain Megatron code, any scaling, in DDP or not."""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.support.models import ARCHITECTURE, fill


class WholeRowAttention(torch.nn.Module):
    """A core attention for unpacked rows [s, b, heads, dim], with RoPE and context parallelism by gathering K and V.

    Megatron's local core has no context parallelism, and its rotation under it needs CUDA.
    """

    def __init__(self, config: Any, layer_number: int, pg_collection: Any = None, **_: Any) -> None:
        super().__init__()
        self.group, dim = pg_collection.cp, config.kv_channels
        self.frequencies = 1.0 / 10000.0 ** (torch.arange(0, dim, 2).float() / dim)

    def _positions(self, length: int, rank: int) -> torch.Tensor:
        size = self.group.size()
        if size == 1:
            return torch.arange(length)
        chunks = torch.arange(length).chunk(2 * size)
        return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]])

    def _turn(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        angle = torch.cat([at[:, None] * self.frequencies] * 2, -1)[:, None, None]
        a, b = x.chunk(2, -1)
        return (x * angle.cos() + torch.cat([-b, a], -1) * angle.sin()).to(x.dtype)

    def forward(self, q: Any, k: Any, v: Any, attention_mask: Any, packed_seq_params: Any = None, **_: Any) -> Any:
        assert packed_seq_params is None, "this model cannot take packs"
        length = q.shape[0] * self.group.size()
        mine = self._positions(length, self.group.rank())
        q, k = self._turn(q, mine), self._turn(k, mine)
        order = torch.cat([self._positions(length, r) for r in range(self.group.size())]).argsort()
        k, v = (_AllRows.apply(t, self.group, mine, order) for t in (k, v))
        seen = mine[:, None] >= torch.arange(length)
        out = F.scaled_dot_product_attention(
            *(t.permute(1, 2, 0, 3) for t in (q, k, v)), attn_mask=seen, enable_gqa=True
        )
        return out.permute(2, 0, 1, 3).reshape(q.shape[0], q.shape[1], -1)


class _AllRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, group: Any, mine: Any, order: Any) -> Any:
        ctx.group, ctx.mine = group, mine
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)[order]

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        dy = dy.contiguous().clone()
        dist.all_reduce(dy, group=ctx.group)
        return dy[ctx.mine], None, None, None


def build(
    core: str,
    *,
    layers: int = 2,
    rotate: str = "model",
    attention: str = "auto",
    wrapped: bool = True,
    bucketed: bool = False,
    frozen: bool = False,
    trained: str = "",
    learned_positions: int | None = None,
    vocab_size: int = ARCHITECTURE["vocab_size"],  # type: ignore[assignment]
    positions: str = "rope",
    model_options: dict[str, Any] | None = None,
    settings_after: dict[str, Any] | None = None,
    parallel_output: bool = True,
    ddp: dict[str, Any] | None = None,
    optimizer: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[list[Any], Any]:
    """(chunks, optimizer). `core`: "stock", "packed" (our public spec, with the backend `attention`), "rows"
    (above), or "engine" (TransformerEngine's attention in stock layers).

    `frozen` takes every parameter of this rank out of training, `trained` those whose names it does not match.
    `optimizer` holds OptimizerConfig's options and `ddp` DistributedDataParallelConfig's, `model_options` GPTModel's.
    `settings_after` are attributes that Megatron sets on a config. With `learned_positions` there is a table of so many
    instead of a rotation.
    """
    from megatron.core import parallel_state as mpu
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    from roll_batching.modeling.rotary import RotarySettings
    from roll_batching.modeling.spec import packed_layer_spec

    settings_of_optimizer: dict[str, Any] = {"lr": 1e-3, "clip_grad": 0.0, "weight_decay": 0.0, **(optimizer or {})}
    model_parallel_cuda_manual_seed(0)
    pp = mpu.get_pipeline_model_parallel_world_size()
    vpp = mpu.get_virtual_pipeline_model_parallel_world_size() or 1
    a = ARCHITECTURE
    settings = {
        "num_layers": layers,
        "hidden_size": a["hidden_size"],
        "ffn_hidden_size": a["ffn_hidden_size"],
        "num_attention_heads": a["num_attention_heads"],
        "num_query_groups": a["num_query_groups"],
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
        "gradient_accumulation_fusion": False,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "tensor_model_parallel_size": mpu.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": vpp if vpp > 1 else None,
        "context_parallel_size": mpu.get_context_parallel_world_size(),
        "pipeline_dtype": torch.float32,
        "moe_token_dispatcher_type": "alltoall",
        "batch_p2p_comm": False,
        **options,
    }
    latent = settings.get("multi_latent_attention", False)
    config = (MLATransformerConfig if latent else TransformerConfig)(**settings)
    for name, value in (settings_after or {}).items():
        setattr(config, name, value)
    rotary = RotarySettings() if rotate == "core" else None
    layer = (
        packed_layer_spec(config, rotary, attention=attention)
        if core == "packed"
        else get_gpt_layer_local_spec(
            config.num_moe_experts, moe_grouped_gemm=False, multi_latent_attention=latent, normalization="RMSNorm"
        )
    )
    if core == "engine":
        from megatron.core.extensions.transformer_engine import TEDotProductAttention

        layer.submodules.self_attention.submodules.core_attention = TEDotProductAttention
    if core == "rows":
        layer.submodules.self_attention.submodules.core_attention = WholeRowAttention
    norm = layer.submodules.input_layernorm
    positions = "none" if core == "rows" or rotate == "core" else positions
    chunks: list[Any] = []
    for stage in range(vpp):
        vp_stage = stage if vpp > 1 else None
        model: Any = GPTModel(
            config,
            TransformerBlockSubmodules([layer] * (layers // pp // vpp), layer_norm=norm),
            vocab_size=vocab_size + vocab_size % config.tensor_model_parallel_size,
            max_sequence_length=learned_positions or 512,
            position_embedding_type="learned_absolute" if learned_positions else positions,
            pre_process=mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            parallel_output=parallel_output,
            share_embeddings_and_output_weights=False,
            vp_stage=vp_stage,
            **(model_options or {}),
        )
        fill([model], vocab_size, mpu.get_tensor_model_parallel_rank(), config.tensor_model_parallel_size)
        if config.fp16:
            model = Float16Module(config, model)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not frozen and re.search(trained, name) is not None)
        if wrapped:
            ddp_config = DistributedDataParallelConfig(
                overlap_grad_reduce=bucketed,
                use_distributed_optimizer=settings_of_optimizer.get("use_distributed_optimizer", False),
                **(ddp or {}),
            )
            model = DistributedDataParallel(config, ddp_config, model)
        chunks.append(model)
    if not wrapped:
        for p in chunks[0].parameters():
            p.main_grad = torch.zeros_like(p)
        return chunks, None
    config.finalize_model_grads_func = finalize_model_grads
    return chunks, get_megatron_optimizer(OptimizerConfig(**settings_of_optimizer), chunks)
