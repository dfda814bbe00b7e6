"""The Triton kernels, run by Triton's interpreter on the CPU, against the torch operators that they replace."""

from __future__ import annotations

import importlib.util
import itertools

import pytest
import torch

from tests.support.ranks import run_ranks

pytestmark = [
    pytest.mark.loss,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
]


def compare_heads(_: None) -> dict[str, float]:
    """Largest relative difference of results and gradients, kernels against operators, per case."""
    from roll_batching.losses import tile_kernels, vocab_parallel

    g = torch.Generator().manual_seed(0)
    rows, vocabulary, hidden = 5, 2300, 8
    found = {}
    switches = itertools.product((True, False), (True, False), (True, False))
    cases = [(torch.float32, *switch, 0.7) for switch in switches]
    cases += [(torch.bfloat16, deferred, True, False, 1.0) for deferred in (True, False)]
    for dtype, deferred, entropy, some, temperature in cases:
        weight = torch.randn(vocabulary, hidden, generator=g).to(dtype).requires_grad_() if deferred else None
        source = torch.randn(rows, hidden if deferred else vocabulary, generator=g).to(dtype).requires_grad_()
        labels = torch.randint(vocabulary - 200, (rows,), generator=g)
        wanted = torch.tensor([0, 3, 4]) if some else None
        upstream = torch.randn(2, rows, generator=g)
        leaves = [leaf for leaf in (source, weight) if leaf is not None]
        outcomes = []
        for kernels in (None, tile_kernels):
            vocab_parallel._kernels = lambda source, kernels=kernels: kernels
            results = vocab_parallel.token_log_probs(
                source, labels, weight=weight, rows=wanted, vocab_size=vocabulary - 100, temperature=temperature,
                entropy=entropy, chunk=2100,
            )  # fmt: skip
            total = sum((x * u).sum() for x, u in zip(results, upstream, strict=True) if x is not None)
            outcomes.append([x for x in results if x is not None] + list(torch.autograd.grad(total, leaves)))
        gaps = [float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(*outcomes, strict=True)]
        found[f"{dtype}, deferred {deferred}, entropy {entropy}, some rows {some}, {temperature}"] = max(gaps)
    return found


def test_one_kernel_equals_a_dozen_passes(report) -> None:
    found = run_ranks(1, "tests.losses.test_tile_kernels:compare_heads", env={"TRITON_INTERPRET": "1"}, fresh=True)[0]
    worst = {kind: max(gap for case, gap in found.items() if kind in case) for kind in ("float32", "bfloat16")}
    report(f"kernels against operators, {len(found)} cases: fp32 {worst['float32']:.1e}, bf16 {worst['bfloat16']:.1e}")
    assert len(found) == 10
    assert worst["float32"] < 1e-5 and worst["bfloat16"] < 1e-2


def compare_rotations(_: None) -> list[float]:
    """Largest difference of rotated heads and of their gradient, per case."""
    from roll_batching.modeling.rotary import RotarySettings, rotate
    from roll_batching.modeling.rotary_kernel import rotate_fused

    found = []
    for lead, heads, dim, percent in (((7,), 4, 16, 1.0), ((3, 2), 3, 24, 0.5), ((5,), 20, 12, 1.0)):
        settings = RotarySettings(percent=percent)
        positions = torch.arange(torch.Size(lead).numel()).view(lead) * 3
        tables = settings.tables(positions, settings.inverse_frequencies(dim))
        wide = torch.randn(*lead, heads, 2 * dim)
        upstream = torch.randn(*lead, heads, dim)
        outcomes = []
        for function in (rotate, rotate_fused):
            x = wide[..., dim:].detach().requires_grad_()  # rows that do not lie next to each other
            out = function(x, tables)
            outcomes.append((out, *torch.autograd.grad(out, x, upstream)))
        found.append(max(float((a - b).abs().max()) for a, b in zip(*outcomes, strict=True)))
    return found


def test_one_kernel_rotates() -> None:
    target = "tests.losses.test_tile_kernels:compare_rotations"
    assert max(run_ranks(1, target, env={"TRITON_INTERPRET": "1"}, fresh=True)[0]) < 1e-5
