"""TransformerEngine's own modules with products of plain torch, so that models of its layers compute on the CPU.

Parameters, sharding, modes of parallelism and Megatron's wrappers are the real ones. Kernels are replaced by torch's,
and TransformerEngine's communication by Megatron's. Nothing is computed in FP8.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock


@contextlib.contextmanager
def plain_kernels() -> Iterator[None]:
    """Inside, TransformerEngine's linear layers, norms and optimizer are made and compute by torch."""
    from megatron.core import optimizer, utils
    from megatron.core.optimizer import clip_grads
    from megatron.core.optimizer import optimizer as base
    from megatron.core.transformer.moe import moe_utils
    from transformer_engine.pytorch import GroupedLinear, LayerNormLinear, Linear
    from transformer_engine.pytorch.ops.basic.rmsnorm import RMSNorm

    parts = ((Linear, _linear), (LayerNormLinear, _norm_linear), (GroupedLinear, _grouped), (RMSNorm, _norm))
    with contextlib.ExitStack() as stack:
        for owner, name, instead in (
            (moe_utils, "te_general_gemm", None),  # Megatron then takes torch's product
            (optimizer, "USING_PYTORCH_OPTIMIZER", True),
            (clip_grads, "l2_norm_impl", utils.local_multi_tensor_l2_norm),
            *((module, "multi_tensor_applier", utils.local_multi_tensor_applier) for module in (base, clip_grads)),
            *((module, "multi_tensor_scale_impl", utils.local_multi_tensor_scale) for module in (base, clip_grads)),
        ):
            stack.enter_context(mock.patch.object(owner, name, instead))
        for owner, forward in parts:
            stack.enter_context(mock.patch.object(owner, "forward", forward))
        yield


def _linear(self: Any, inp: Any, **unused: Any) -> Any:
    import torch.nn.functional as F
    from megatron.core.tensor_parallel import mappings

    assert not self.use_bias
    group, weight = self.tp_group, self.weight
    if self.parallel_mode == "column" and self.tp_size > 1:
        if self.sequence_parallel:
            inp = mappings.gather_from_sequence_parallel_region(inp, group=group)
        else:
            inp = mappings.copy_to_tensor_model_parallel_region(inp, group)
    out = F.linear(inp, weight)
    if self.parallel_mode == "row" and self.tp_size > 1:
        if self.sequence_parallel:
            return mappings.reduce_scatter_to_sequence_parallel_region(out, group=group)
        return mappings.reduce_from_tensor_model_parallel_region(out, group)
    return out


def _rms_norm(x: Any, weight: Any, eps: float, is_zero_centred: bool) -> Any:
    import torch.nn.functional as F

    return F.rms_norm(x, weight.shape, 1 + weight if is_zero_centred else weight, eps)


def _norm_linear(self: Any, inp: Any, **unused: Any) -> Any:
    assert not self.return_layernorm_output and self.normalization == "RMSNorm"
    return _linear(self, _rms_norm(inp, self.layer_norm_weight, self.eps, self.zero_centered_gamma))


def _grouped(self: Any, inp: Any, m_splits: Any, **unused: Any) -> Any:
    import torch
    import torch.nn.functional as F

    assert not self.use_bias
    parts = inp.split([int(count) for count in m_splits])
    return torch.cat([F.linear(part, getattr(self, f"weight{n}")) for n, part in enumerate(parts)])


def _norm(self: Any, x: Any) -> Any:
    return _rms_norm(x, self.weight, self.eps, self.zero_centered_gamma)
