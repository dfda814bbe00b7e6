"""LoRA adapters on Megatron's local linear layers, with one pair of matrices per Hugging Face projection.

An adapter adds `scale * B A x` to the output of its layer. Megatron fuses queries, keys and values, and gate and up
projection; each of them has a pair (A, B) here, as in PEFT, and the outputs are joined as the fused rows are.

What is sharded follows the layer. Column-parallel: B by rows, A replicated. Row-parallel: A by columns, B replicated.
Only the `rank` channels between them are communicated. Adapters are named by their layer in the whole model.
"""

from __future__ import annotations

import contextlib
import math
import re
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from roll_batching.errors import LayoutError
from roll_batching.modeling.head import gpt_of
from roll_batching.settings.adapters import LAYERS, AdapterArgs

NAME = "adapter"
"""Attribute of a linear layer that holds its adapter, and part of the names of its parameters."""


class Adapter(torch.nn.Module):
    """The adapters of a linear layer: parameters `{projection}_a` [rank, in] and `{projection}_b` [out, rank]."""

    def __init__(self, linear: Any, names: Sequence[str], sizes: Sequence[int], args: AdapterArgs) -> None:
        """Starts at zero. `names` are the projections of the layer, and `sizes` this rank's rows of each."""
        super().__init__()
        self.scale, self.names, self.sizes = args.lora_scale, tuple(names), dict(zip(names, sizes, strict=True))
        self.parts = tuple(name for name in names if name in (args.lora_target or ()))
        """The projections that have an adapter."""
        self.enabled = True
        self.is_row_parallel = isinstance(linear, RowParallelLinear)
        weight = linear.weight
        for name in self.parts:
            a, b = weight.new_zeros(args.lora_rank, weight.shape[1]), weight.new_zeros(self.sizes[name], args.lora_rank)
            self.register_parameter(f"{name}_a", _parameter(a, linear, 1 if self.is_row_parallel else None))
            self.register_parameter(f"{name}_b", _parameter(b, linear, None if self.is_row_parallel else 0))

    def a(self, name: str) -> torch.Tensor:
        """This rank's A of a projection."""
        matrix: torch.Tensor = getattr(self, f"{name}_a")
        return matrix

    def b(self, name: str) -> torch.Tensor:
        """This rank's B of a projection."""
        matrix: torch.Tensor = getattr(self, f"{name}_b")
        return matrix

    def forward(self, linear: Any, x: torch.Tensor) -> torch.Tensor:
        """The adapters' addition to the output of `linear` for its input x."""
        low = F.linear(x, torch.cat([self.a(name) for name in self.parts]))
        low = self.scale * (_reduced if self.is_row_parallel else _copied)(linear, low)
        pieces = zip(self.parts, low.chunk(len(self.parts), -1), strict=True)
        return self.join(linear, {name: F.linear(piece, self.b(name)) for name, piece in pieces}, -1)

    @torch.no_grad()
    def delta(self, linear: Any) -> torch.Tensor:
        """The adapters' addition to this rank's weight of `linear`, in at least fp32."""
        dtype = torch.promote_types(linear.weight.dtype, torch.float32)
        products = {name: self.b(name).to(dtype) @ self.a(name).to(dtype) for name in self.parts}
        return self.scale * self.join(linear, products, 0)

    def join(self, linear: Any, outputs: dict[str, torch.Tensor], dim: int) -> torch.Tensor:
        """Outputs of the projections joined along `dim` as the layer's rows are; zeros for those without adapter."""
        if len(self.names) == 1:
            return outputs[self.names[0]]
        like = next(iter(outputs.values()))
        # Rows of queries, keys and values lie together by query group; those of gate and up projection do not.
        groups = linear.config.num_query_groups // linear.tp_group.size() if "k_proj" in self.names else 1
        dim %= like.dim()

        def grouped(name: str) -> torch.Tensor:
            shape = [*like.shape[:dim], groups, self.sizes[name] // groups, *like.shape[dim + 1 :]]
            return outputs[name].view(shape) if name in outputs else like.new_zeros(()).expand(shape)

        return torch.cat([grouped(name) for name in self.names], dim + 1).flatten(dim, dim + 1)


def _copied(linear: Any, low: torch.Tensor) -> torch.Tensor:
    """The input of B of a column-parallel layer: whole sequences, whose gradient is summed over shards of B."""
    if linear.explicit_expert_comm or linear.tp_group.size() == 1:
        return low
    if linear.sequence_parallel:
        return gather_from_sequence_parallel_region(low, tensor_parallel_output_grad=True, group=linear.tp_group)
    return copy_to_tensor_model_parallel_region(low, group=linear.tp_group)


def _reduced(linear: Any, low: torch.Tensor) -> torch.Tensor:
    """The input of B of a row-parallel layer: summed over shards of A; experts' outputs are summed later."""
    if linear.explicit_expert_comm or linear.tp_group.size() == 1:
        return low
    if linear.sequence_parallel:
        return reduce_scatter_to_sequence_parallel_region(low, group=linear.tp_group)
    return reduce_from_tensor_model_parallel_region(low, group=linear.tp_group)


def _parameter(values: torch.Tensor, linear: Any, split: int | None) -> torch.nn.Parameter:
    """A parameter with the attributes that Megatron's reduction and gradient norm read; `split`: its sharded axis."""
    parameter: Any = torch.nn.Parameter(values)
    ranks = linear.tp_group.size()
    parameter.allreduce = getattr(linear.weight, "allreduce", True)
    if split is not None or (linear.is_expert and ranks == 1):  # else the norm counts it on the first TP rank only
        parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, split or 0, 1
    if split is None and ranks > 1 and (linear.sequence_parallel or linear.is_expert):
        # Its gradient is that of this rank's tokens, or of this rank's part of an expert: Megatron sums it over TP.
        parameter.sequence_parallel = True
    return parameter


class _Adapted:
    """Methods of a linear layer with an adapter."""

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """The layer's sharded state, with its adapters, sharded in the same way."""
        layer: Any = self
        state: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)  # type: ignore[misc]
        adapter = layer.adapter
        suffix, axis = ("_a", 1) if adapter.is_row_parallel else ("_b", 0)
        adapter_state = {f"{NAME}.{name}": value for name, value in adapter.state_dict(keep_vars=True).items()}
        axes = {name: axis for name in adapter_state if name.endswith(suffix)}
        groups = {"tp_group": layer.tp_group, "dp_cp_group": metadata["dp_cp_group"]}
        return {**state, **make_sharded_tensors_for_checkpoint(adapter_state, prefix, axes, sharded_offsets, **groups)}


class AdaptedColumn(_Adapted, ColumnParallelLinear):
    """A column-parallel layer with an adapter."""

    def forward(self, input_: torch.Tensor, *arguments: Any, **keywords: Any) -> tuple[torch.Tensor, Any]:
        """Output with the adapter's, and bias."""
        output, bias = super().forward(input_, *arguments, **keywords)
        return (output + self.adapter(self, input_) if self.adapter.enabled else output), bias


class AdaptedRow(_Adapted, RowParallelLinear):
    """A row-parallel layer with an adapter."""

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Output with the adapter's, and bias."""
        output, bias = super().forward(input_)
        return (output + self.adapter(self, input_) if self.adapter.enabled else output), bias


_CLASSES: dict[type, type] = {ColumnParallelLinear: AdaptedColumn, RowParallelLinear: AdaptedRow}


def attach_adapters(chunk: torch.nn.Module, args: AdapterArgs, seed: int) -> None:
    """Freezes the parameters of a model chunk and gives its layers adapters: B is zero, A random.

    Values of A depend on `seed` and the projection, and on no parallel layout. Raises `LayoutError` for layers of
    another kind.
    """
    gpt = gpt_of(chunk)
    for parameter in gpt.parameters():
        parameter.requires_grad_(False)
    for path, linear in list(gpt.decoder.named_modules()):
        kind = path.rpartition(".")[2]
        if not set(LAYERS.get(kind, ())) & set(args.lora_target or ()):
            continue
        if type(linear) not in _CLASSES:
            raise LayoutError(
                f"{path} is {type(linear).__name__}, and adapters are tested on Megatron's local linear layers only: "
                "leave lora_target out, or set transformer_impl: local"
            )
        linear.adapter = Adapter(linear, LAYERS[kind], _rows(linear, kind), args)
        linear.__class__ = _CLASSES[type(linear)]
        _draw(gpt, f"decoder.{path}.{NAME}", linear, seed)
    require_embedding_gradients(gpt)


def _rows(linear: Any, kind: str) -> list[int]:
    """This rank's rows of each projection of a linear layer."""
    if kind == "linear_qkv":
        config, ranks = linear.config, linear.tp_group.size()
        heads = (config.num_attention_heads, config.num_query_groups, config.num_query_groups)
        return [count * config.kv_channels // ranks for count in heads]
    parts = len(LAYERS[kind])
    return [linear.weight.shape[0] // parts] * parts


@torch.no_grad()
def _draw(gpt: Any, path: str, linear: Any, seed: int) -> None:
    """Initialises A as torch initialises a linear layer (and PEFT A): uniform within 1 / sqrt(inputs)."""
    ranks, rank = linear.tp_group.size(), linear.tp_group.rank()
    for name in linear.adapter.parts:
        target = linear.adapter.a(name)
        columns = target.shape[1] * (ranks if linear.adapter.is_row_parallel else 1)
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {global_name(gpt, path)}.{name}".encode()))
        bound = 1 / math.sqrt(columns)
        values = torch.empty(target.shape[0], columns).uniform_(-bound, bound, generator=generator)
        target.copy_(values.chunk(ranks, 1)[rank] if linear.adapter.is_row_parallel else values)


def adapted_layers(chunks: Sequence[Any]) -> Iterator[Any]:
    """The linear layers of `chunks` that have adapters."""
    for chunk in chunks:
        yield from (module for module in gpt_of(chunk).modules() if isinstance(module, _Adapted))


@contextlib.contextmanager
def adapters_off(chunks: Sequence[Any]) -> Iterator[None]:
    """Context in which the model computes as if it had no adapters."""
    layers = list(adapted_layers(chunks))
    for layer in layers:
        layer.adapter.enabled = False
    try:
        yield
    finally:
        for layer in layers:
            layer.adapter.enabled = True


@torch.no_grad()
def merged_weight(linear: Any) -> torch.Tensor:
    """This rank's weight of a layer with its adapters added, rounded once to the weight's dtype."""
    delta = linear.adapter.delta(linear)
    return (linear.weight.to(delta.dtype) + delta).to(linear.weight.dtype)


# ---- parameter names


_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"(local_experts\.|experts\.linear_fc[12]\.weight)(\d+)")


def global_name(gpt: Any, name: str) -> str:
    """The parameter name `name` with the indices of layer and expert in the whole model."""
    layer = _LAYER.match(name)
    if layer is not None:
        layer_index = gpt.decoder.layers[int(layer[1])].layer_number - 1
        name = f"decoder.layers.{layer_index}.{name[layer.end() :]}"
    elif not name.startswith("mtp."):
        return name
    experts = gpt.config.num_moe_experts
    if experts is None:
        return name
    first = gpt.pg_collection.ep.rank() * (experts // gpt.config.expert_model_parallel_size)
    return _EXPERT.sub(lambda match: f"{match[1]}{int(match[2]) + first}", name)


# ---- frozen embedding


def require_embedding_gradients(gpt: Any) -> None:
    """Lets gradients reach the output of a frozen embedding; does nothing on stages without one.

    Recomputation drops the graph of inputs that need no gradient: the first layers would get none.
    """
    if gpt.pre_process:
        gpt.embedding.register_forward_hook(_require_gradient)


def _require_gradient(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() and not output.requires_grad else output
