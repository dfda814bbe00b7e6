"""Corrects places where Megatron-Core 0.16 relies on TransformerEngine although it is not installed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


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
