"""A batch without random numbers, for which results of peers' functions can be recorded in tests."""

from __future__ import annotations

from typing import Any

import torch

from tests.losses.formulas import run

LENGTHS = (7, 4, 12, 5, 9, 3, 8, 6)


def wave(k: float, scale: float = 1.0, shift: float = 0.0, n: int = sum(LENGTHS)) -> torch.Tensor:
    """[n] shift + scale * sin(k i), i from 1."""
    return shift + scale * torch.sin(k * torch.arange(1, n + 1, dtype=torch.float64))


def batch(mask: torch.Tensor | None = None) -> Any:
    """Samples of LENGTHS tokens; every one has counted tokens."""
    from roll_batching.samples import SampleBatch

    count = len(LENGTHS)
    tokens = sum(LENGTHS)
    flat = {
        "input_ids": torch.arange(tokens) % 50,
        "response_mask": (7 * torch.arange(tokens)) % 10 < 7 if mask is None else mask,
        "token_advantages": wave(0.9),
        "old_log_probs": wave(1.3, 0.6, -2),
        "ref_log_probs": wave(1.7, 0.6, -2),
        "rollout_log_probs": wave(2.3, 0.5, -2),
    }
    samples = {
        "advantages": wave(2.9, 1.0, 0.1, count),
        "rewards": wave(3.7, 1.0, 0.0, count),
        "pair": torch.tensor([3, 1, 2, 2, 0, 3, 0, 1]),
        "chosen": torch.tensor([True, True, False, True, True, False, False, False]),
    }
    kinds = {name: "next_token" if name.endswith("log_probs") else "token" for name in flat}
    return SampleBatch.from_lists(
        {name: list(values.split(LENGTHS)) for name, values in flat.items()} | samples,
        kinds | dict.fromkeys(samples, "sample"),
        ids=[10 * i for i in range(count)],
    )


def rows() -> torch.Tensor:
    """[tokens, 2]: log-probs and entropies."""
    return torch.stack([wave(1.1, 0.6, -2), wave(0.7, 0.3, 1)], -1)


def figures(loss: Any, data: Any = None, **options: Any) -> tuple[float, float, float]:
    """The loss, its gradient's norm by the log-probs, and that gradient's product with a wave."""
    value, gradient, _ = run(loss, batch() if data is None else data, rows=rows(), **options)
    by_log_probs = gradient[:, 0]
    return value, float(by_log_probs.norm()), float(by_log_probs @ wave(0.37))
