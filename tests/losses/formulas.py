"""Samples in real packs with log-probs as leaves instead of a model, and losses written in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

LENGTHS = (7, 1, 12, 5, 9, 3, 8, 6)
ROLLOUTS = (5, 5, -2, 5, 9, -2, 7, 7)
"""Of those with counted tokens: two samples of 5, two of -2, none of 9, two of 7."""


def batch(seed: int = 0) -> Any:
    from roll_batching.samples import SampleBatch

    g = torch.Generator().manual_seed(seed)

    def rows(make: Callable[[int], torch.Tensor]) -> list[torch.Tensor]:
        return [make(n) for n in LENGTHS]

    def log_probs(n: int) -> torch.Tensor:
        return -2 + 0.5 * torch.randn(n, generator=g, dtype=torch.float64)

    masks = rows(lambda n: torch.rand(n, generator=g) < 0.7)
    masks[4][:] = False  # a sequence without counted tokens
    count = len(LENGTHS)
    return SampleBatch.from_lists(
        {
            "input_ids": rows(lambda n: torch.randint(0, 50, (n,), generator=g)),
            "response_mask": masks,
            "advantages": torch.randn(count, generator=g, dtype=torch.float64),
            "token_advantages": rows(lambda n: torch.randn(n, generator=g, dtype=torch.float64)),
            "old_log_probs": rows(log_probs),
            "ref_log_probs": rows(log_probs),
            "rollout_log_probs": rows(log_probs),
            "weights": torch.rand(count, generator=g, dtype=torch.float64),
            "pair": torch.tensor([3, 1, 2, 2, 0, 3, 0, 1]),
            "chosen": torch.tensor([True, True, False, True, True, False, False, False]),
            "rollout_ids": torch.tensor(ROLLOUTS),
        },
        {
            "input_ids": "token",
            "response_mask": "token",
            "token_advantages": "token",
            "old_log_probs": "next_token",
            "ref_log_probs": "next_token",
            "rollout_log_probs": "next_token",
            **dict.fromkeys(("advantages", "weights", "pair", "chosen", "rollout_ids"), "sample"),
        },
        ids=[10 * i for i in range(count)],
    )


BINS = [[2, 0, 5], [7, 4, 6], [1], [3]]


def run(
    loss: Any,
    data: Any,
    bins: list[list[int]] = BINS,
    dtype: torch.dtype = torch.float64,
    rows: torch.Tensor | None = None,
) -> tuple[float, torch.Tensor, dict[str, float]]:
    """(loss, gradient by the flat log-probs and entropies, metrics) over the micro-batches `bins`.

    `rows`, [tokens, 2], are these; by default `leaves`.
    """
    from roll_batching.losses.contract import as_numbers, join_parts, loss_spec, to_host
    from roll_batching.losses.denominators import local_counts
    from roll_batching.losses.views import TokenView
    from roll_batching.packing.batch import pack_step
    from roll_batching.planning import Plan, PlanConstraints

    spec = loss_spec(loss)
    plan = Plan.from_bins(
        [bins], data.lengths.numpy(), PlanConstraints(dp_size=1, max_tokens=1024), ids=data.ids.numpy()
    )
    packs = pack_step(data, plan, dp_rank=0, device=torch.device("cpu"), masks=spec.masks)
    if spec.check:
        spec.check(data, [data.rows_of(pack.ids).numpy() for pack in packs if pack.samples])
    counts = local_counts(data, spec.masks, spec.sums, rollouts=spec.rollouts)
    leaf = (leaves(data) if rows is None else rows).detach().to(dtype).requires_grad_()
    total, metrics = torch.zeros((), dtype=torch.float64), []
    for pack in packs:
        if not pack.samples:
            continue
        counted = torch.stack(list(pack.masks.values())).any(0)
        source = torch.from_numpy(pack.layout.source(data.offsets[data.rows_of(pack.ids)].numpy()))
        both = torch.where(counted[:, None], leaf[source], 0.0)
        output = loss.token_loss(TokenView(pack, counts, log_probs=both[:, 0], entropy=both[:, 1], values=both[:, 0]))
        total = total + output.loss
        metrics.append(output.metrics)
    (gradient,) = torch.autograd.grad(total, leaf)
    return float(total), gradient, as_numbers(join_parts([to_host([], metrics)[1]]))


def leaves(data: Any) -> torch.Tensor:
    """[tokens, 2]: log-probs and entropies of every row."""
    g = torch.Generator().manual_seed(99)
    values = torch.stack([-2 + torch.randn(data.num_tokens, generator=g), torch.rand(data.num_tokens, generator=g)], -1)
    return values.double().requires_grad_()


def formula(data: Any, of_sequence: Callable[..., Any], join: Callable[[list[Any]], Any]) -> tuple[float, torch.Tensor]:
    """A loss from `join` over `of_sequence(fields, lp, entropy)` of each sequence's counted rows."""
    leaf = leaves(data)
    parts = []
    for i, (start, length) in enumerate(zip(data.offsets.tolist(), data.lengths.tolist(), strict=False)):
        fields: dict[str, Any] = {}
        keep = data.to_lists("response_mask")[i][1:].bool()
        for name, spec in data.schema.items():
            values = data.to_lists(name)[i] if spec.per_token else data[name][i]
            if spec.per_token:
                values = (values[1:] if spec.kind == "token" else values[:-1])[keep]
            fields[name] = values
        rows = leaf[start : start + length - 1][keep]
        parts.append(of_sequence(fields, rows[:, 0], rows[:, 1]))
    total = join(parts)
    (gradient,) = torch.autograd.grad(total, leaf)
    return float(total), gradient


def token_mean(parts: list[Any]) -> Any:
    return torch.cat(parts).sum() / sum(len(p) for p in parts)


def sequence_mean(parts: list[Any]) -> Any:
    return sum(p.mean() for p in parts if len(p)) / sum(len(p) > 0 for p in parts)


def sequence_sum(parts: list[Any]) -> Any:
    return sum(p.sum() for p in parts) / sum(len(p) > 0 for p in parts)


def by_rollout(of_rollout: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    def join(parts: list[Any]) -> Any:
        samples = [(one, part) for one, part in zip(ROLLOUTS, parts, strict=True) if len(part)]
        return sum(of_rollout([part for one, part in samples if one == rollout]) for rollout in (5, -2, 7)) / 3

    return join


def ppo(f: dict[str, Any], lp: Any, low: float = 0.2, high: float = 0.2) -> Any:
    ratio = torch.exp(lp - f["old_log_probs"])
    a = f["advantages"]
    return -torch.min(ratio * a, torch.clip(ratio, 1 - low, 1 + high) * a)


def close(found: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-12)
    assert float((found[1] - expected[1]).norm() / expected[1].norm()) < 1e-12
