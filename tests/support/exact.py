"""One rule for limits of equality: compare in fp64, or against the rounding that the right result has itself.

A fixed limit of fp32 results fits the processor on which it was measured: others sum in another order, and tensors
whose parts cancel lose more digits. The same code in fp64 leaves six digits between rounding and the limit.
"""

from __future__ import annotations

DTYPE = "fp64"
"""Of models whose results are compared."""
EXACT = 1e-9
"""Largest relative difference of equal results. Rounding leaves 1e-16 to 1e-13 here, wrong terms more than 1e-6."""
OF_ROUTERS = 1e-6
"""The same for gradients, and weights that they changed, of mixtures of experts. Megatron's routers take their softmax
and its gradient in fp32, whatever the dtype of the model: one rounding of 6e-8, before or after a sum."""
FACTOR = 8
"""In fp32, for Megatron's distributed optimizer, which has no fp64: this many times the rounding."""


def dtype_for(*, distributed_optimizer: bool) -> str:
    """Dtype of a model whose results are compared."""
    return "fp32" if distributed_optimizer else DTYPE


def limit_of(rounding: float) -> float:
    """Limit in fp32, where the right result differs by `rounding` from itself, in fp64 or computed in other packs."""
    return FACTOR * max(rounding, 2.0**-23)
