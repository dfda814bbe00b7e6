"""flash-linear-attention's kernels over runs, beside plain torch. They need a GPU, or Triton's interpreter.

They were compared in Triton's interpreter on a CPU; no GPU has run them here.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch

from roll_batching.modeling.delta_kernels import kernel, kernel_rule
from roll_batching.modeling.recurrences import gated_delta_rule
from roll_batching.packing.prefetch import map_tensors
from tests.modeling.test_state_trees import FORESTS, chunks_of, largest_gap, layout_of, random_inputs

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")

pytestmark = [
    pytest.mark.skipif(kernel() is None, reason="flash-linear-attention is not installed"),
    pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="no GPU"),
]


@pytest.mark.parametrize("forest", FORESTS)
def test_kernels_over_trees(forest: str, report: Callable[[str], None]) -> None:
    layout = layout_of(forest)
    chunks = map_tensors(chunks_of(layout), lambda tensor: tensor.to(DEVICE))
    inputs = [x.detach().float().to(DEVICE).requires_grad_() for x in random_inputs(layout.tokens, "delta rule", 16)]
    expected, _ = gated_delta_rule(*inputs, chunks)
    found, _ = kernel_rule(*inputs, chunks, dtype=torch.float32)
    gap = largest_gap(found, expected, inputs)
    report(f"kernels over {forest}, fp32: outputs and gradients within {gap:.1e} of plain torch")
    assert gap < (1e-4 if INTERPRETED else 2e-2)  # on a GPU products of fp32 may be rounded to TF32
