"""Corrections of Megatron's layers: padding in MoE routers, and 0.16 where TransformerEngine is not installed."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch


@contextlib.contextmanager
def router_padding_masked(chunks: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Patches routers so that they count and balance real tokens only, also in a micro-batch without any.

    For Megatron 0.16 to 0.19.

    Expert bias: Megatron combines the routing map [tokens, experts] with the mask [tokens], which fails, or counts
    wrongly if there are as many tokens as experts. `_apply_expert_bias` gets a masked map instead.

    Auxiliary loss: over no real token it is 0 / 0, and every gradient NaN. `switch_load_balancing_loss_func` gets at
    least 1 token. Evaluation mode, in which routers add no losses, is no alternative: its layers are not recomputed in
    backward, and ranks that share experts would wait for the tokens of a recomputed layer.
    """
    from megatron.core.transformer.moe import router as router_module

    module: Any = router_module
    balancing_loss = module.switch_load_balancing_loss_func
    routers: list[Any] = [m for chunk in chunks for m in chunk.modules() if getattr(m, "enable_expert_bias", False)]
    for router in routers:
        router._apply_expert_bias = functools.partial(_count_real_tokens, router._apply_expert_bias)
    module.switch_load_balancing_loss_func = functools.partial(_balance_real_tokens, balancing_loss)
    try:
        yield
    finally:
        module.switch_load_balancing_loss_func = balancing_loss
        for router in routers:
            del router._apply_expert_bias


def _count_real_tokens(count: Any, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
    count(routing_map if padding_mask is None else routing_map & ~padding_mask[:, None])


def _balance_real_tokens(balancing_loss: Any, *, total_num_tokens: Any, **arguments: Any) -> torch.Tensor:
    """Megatron's auxiliary loss; 0 with gradients of 0 if no token is real. Without a host read."""
    if isinstance(total_num_tokens, torch.Tensor):
        total_num_tokens = total_num_tokens.clamp(min=1)
    loss: torch.Tensor = balancing_loss(total_num_tokens=total_num_tokens, **arguments)
    return loss


# ---- Megatron-Core 0.16 without TransformerEngine


@contextlib.contextmanager
def latent_attention_construction() -> Iterator[None]:
    """Context for constructing `MLASelfAttention`; changes nothing where TransformerEngine is installed.

    Megatron-Core 0.16 sets HAVE_TE when its own wrapper module imports, then calls `isinstance(layer, TELinear)` with
    a TELinear that is no class. 0.17 to 0.19 check TransformerEngine itself.
    """
    from megatron.core.transformer import multi_latent_attention as module

    wrong = module.HAVE_TE and not isinstance(module.TELinear, type)
    if wrong:
        module.HAVE_TE = False
    try:
        yield
    finally:
        if wrong:
            module.HAVE_TE = True


def define_router_gemm() -> None:
    """Defines the GEMM of Megatron's MoE routers as None, which selects torch's product, where it is undefined.

    Megatron-Core 0.16 imports `te_general_gemm` only where TransformerEngine is installed, and reads it in every pass
    of a router. 0.17 to 0.19 define it. It stays defined, because backward passes read it as well.
    """
    from megatron.core.transformer.moe import moe_utils

    module: Any = moe_utils
    if not hasattr(module, "te_general_gemm"):
        module.te_general_gemm = None
