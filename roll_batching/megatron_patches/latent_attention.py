"""Constructs Megatron's multi-latent attention where TransformerEngine is not installed.

Megatron-Core 0.16 takes TransformerEngine for installed whenever its own module for it can be imported. Then it asks
whether a layer is an instance of a class that is none. 0.19 asks that module. The name is set only while a layer is
constructed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from megatron.core.transformer import multi_latent_attention


@contextlib.contextmanager
def construction_without_engine() -> Iterator[None]:
    """Context for constructing `MLASelfAttention`; changes nothing where TransformerEngine is installed."""
    wrong = multi_latent_attention.HAVE_TE and not isinstance(multi_latent_attention.TELinear, type)
    if wrong:
        multi_latent_attention.HAVE_TE = False
    try:
        yield
    finally:
        if wrong:
            multi_latent_attention.HAVE_TE = True
