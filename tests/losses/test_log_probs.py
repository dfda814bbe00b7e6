"""`token_log_probs` against log_softmax: logits and hidden states, tiles, dtypes, padded columns, shards, rows."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tests.support.ranks import run_ranks

pytestmark = pytest.mark.loss

ROWS, HIDDEN, VOCABULARY, PADDED = 23, 12, 61, 64
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}


def inputs(dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(hidden [ROWS, HIDDEN], head [PADDED, HIDDEN] with large padded columns, labels)."""
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(ROWS, HIDDEN, generator=g, dtype=torch.float64)
    weight = torch.randn(PADDED, HIDDEN, generator=g, dtype=torch.float64)
    weight[VOCABULARY:] = 30.0
    labels = torch.randint(0, VOCABULARY, (ROWS,), generator=g)
    return hidden.to(dtype), weight.to(dtype), labels


def plain(logits: torch.Tensor, labels: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    log_p = (logits[:, :VOCABULARY].double() / temperature).log_softmax(-1)
    return log_p.gather(1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def scalar(log_probs: torch.Tensor, entropies: torch.Tensor | None, rows: torch.Tensor | None) -> torch.Tensor:
    weights = torch.linspace(-1, 1, ROWS, dtype=torch.float64)
    keep = torch.ones(ROWS) if rows is None else torch.zeros(ROWS).index_fill(0, rows, 1)
    both = (weights * keep * log_probs).sum()
    return both if entropies is None else both + 0.7 * (weights.flip(0) * keep * entropies).sum()


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-12))


CASES = list(
    itertools.product(
        (torch.float64, torch.float32, torch.bfloat16),
        (False, True),  # deferred head
        (True, False),  # entropy
        (None, torch.tensor([0, 3, 4, 11, 22])),
        (None, 5),  # chunk
        (1.0, 0.7),
    )
)


def test_values_and_gradients_equal_log_softmax() -> None:
    from roll_batching.losses import token_log_probs

    for dtype, deferred, want_entropy, rows, chunk, temperature in CASES:
        hidden, weight, labels = inputs(dtype)
        hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
        logits = (hidden @ weight.t()).detach().requires_grad_()
        leaves = (hidden, weight) if deferred else (logits,)
        before = [leaf.detach().clone() for leaf in leaves]
        found = token_log_probs(
            hidden if deferred else logits,
            labels,
            weight=weight if deferred else None,
            rows=rows,
            vocab_size=VOCABULARY,
            temperature=temperature,
            entropy=want_entropy,
            chunk=chunk,
        )
        got = torch.autograd.grad(scalar(*found, rows), leaves)
        exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
        expected = plain(exact[0] @ exact[1].t() if deferred else exact[0], labels, temperature)
        right = torch.autograd.grad(scalar(expected[0], expected[1] if want_entropy else None, rows), exact)
        case = (dtype, deferred, want_entropy, rows, chunk, temperature)
        limit = TOLERANCE[dtype]
        at = slice(None) if rows is None else rows
        assert relative(found[0][at], expected[0][at]) < limit, case
        assert found[0].dtype == (torch.float64 if dtype is torch.float64 else torch.float32)
        if want_entropy:
            assert relative(found[1][at], expected[1][at]) < limit, case
        if rows is not None:
            assert float(found[0].detach().index_fill(0, rows, 0).abs().sum()) == 0.0, case
        for mine, theirs in zip(got, right, strict=True):
            assert relative(mine, theirs) < limit, case
        if deferred:
            assert float(got[1][VOCABULARY:].abs().sum()) == 0.0, "padded columns have no gradient"
        assert all(torch.equal(leaf, old) for leaf, old in zip(leaves, before, strict=True)), "inputs are untouched"


def test_one_output_alone_has_its_own_gradient() -> None:
    from roll_batching.losses import token_log_probs

    hidden, weight, labels = inputs(torch.float64)
    for place in (0, 1):
        x = (hidden @ weight.t()).detach().requires_grad_()
        (got,) = torch.autograd.grad(token_log_probs(x, labels, vocab_size=VOCABULARY, entropy=True)[place].sum(), x)
        (right,) = torch.autograd.grad(plain(x, labels, 1.0)[place].sum(), x)
        assert relative(got, right) < 1e-12


def test_no_rows_still_run_the_head_without_an_effect() -> None:
    from roll_batching.losses import token_log_probs

    hidden, weight, labels = inputs(torch.float32)
    hidden[0] = float("nan")
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    none = torch.zeros(0, dtype=torch.int64)
    log_probs, entropies = token_log_probs(hidden, labels, weight=weight, rows=none, entropy=True)
    assert float((log_probs + entropies).abs().sum()) == 0.0
    (log_probs + entropies).sum().backward()
    assert weight.grad is not None and hidden.grad is not None, "every parameter takes part"


def test_the_recomputed_tile_ignores_later_writes_or_says_so() -> None:
    """Writing into given logits after the forward pass is noticed by autograd, not silently recomputed from."""
    from roll_batching.losses import token_log_probs

    hidden, weight, labels = inputs(torch.float32)
    x = (hidden @ weight.t()).requires_grad_()
    logits = x * 1.0
    log_probs, _ = token_log_probs(logits, labels)
    logits.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        log_probs.sum().backward()


def shards(payload: Any) -> list[float]:
    """Two vocabulary shards, one of them half padded, against the whole: values and gradients."""
    import torch.distributed as dist

    from roll_batching.losses import token_log_probs

    dist.init_process_group("gloo")
    rank, gaps = dist.get_rank(), []
    for size, vocab in ((64, 61), (128, 61)):  # in the second the last rank has padding only
        hidden, weight, labels = inputs(torch.float64)
        weight = torch.cat([weight, torch.full((size - PADDED, HIDDEN), 40.0, dtype=torch.float64)])
        half = size // 2
        for deferred in (False, True):
            h, w = hidden.clone().requires_grad_(), weight[rank * half : rank * half + half].clone().requires_grad_()
            whole = (hidden @ weight.t()).requires_grad_()
            x = whole.detach()[:, rank * half : rank * half + half].clone().requires_grad_()
            found = token_log_probs(
                h if deferred else x,
                labels,
                weight=w if deferred else None,
                vocab_size=vocab,
                entropy=True,
                tp_group=dist.group.WORLD,
                chunk=7,
            )
            expected = plain(whole, labels, 1.0)
            gaps += [relative(a, b) for a, b in zip(found, expected, strict=True)]
            leaves = (h, w) if deferred else (x,)
            got = torch.autograd.grad(scalar(*found, None), leaves)
            (d_whole,) = torch.autograd.grad(scalar(*expected, None), whole)
            mine = d_whole[:, rank * half : rank * half + half]
            if deferred:  # each shard gives its part of the hidden states' gradient
                total = got[0].clone()
                dist.all_reduce(total)
                gaps += [relative(total, d_whole @ weight), float((got[1] - mine.t() @ hidden).norm())]
            else:
                gaps.append(float((got[0] - mine).norm()))
    return gaps


def test_vocabulary_shards_equal_the_whole() -> None:
    for gaps in run_ranks(2, "tests.losses.test_log_probs:shards"):
        assert len(gaps) == 14 and max(gaps) < 1e-12
