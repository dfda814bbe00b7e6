"""Shares of clipped, bounded and masked tokens count those that were, and no rounding: in fp32, and exactly."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from roll_batching.losses import CISPOLoss, GMPOLoss, PolicyLoss, ValueLoss
from tests.losses.formulas import run
from tests.losses.test_value import counted_rows, with_returns

pytestmark = pytest.mark.loss


def samples() -> Any:
    from roll_batching.samples import SampleBatch

    lengths, g = [500] * 4, torch.Generator().manual_seed(1)
    columns = {
        "input_ids": [torch.randint(0, 50, (n,), generator=g) for n in lengths],
        "response_mask": [torch.rand(n, generator=g) < 0.7 for n in lengths],
        "advantages": torch.randn(len(lengths), generator=g),
    }
    return SampleBatch.from_lists(columns, {"input_ids": "token", "response_mask": "token", "advantages": "sample"})


def moved(data: Any, spread: float) -> tuple[Any, torch.Tensor]:
    """`data` with old values and log-probs, the engine's, and returns in fp32; rows at most `spread` from the old.

    Rows are no sums of the old ones and a distance: fp32 has their distances exactly, and no rounding would show.
    """
    g = torch.Generator().manual_seed(3)
    draw = lambda: 0.5 * spread * (2 * torch.rand(data.num_tokens, generator=g) - 1)  # noqa: E731
    old, new = draw(), draw()
    data = with_returns(data, draw(), old)
    same = {name: old for name in ("old_log_probs", "ref_log_probs")}
    same["rollout_log_probs"] = draw()
    rows = torch.stack([new, torch.zeros_like(old)], -1)
    return data.with_fields(same, dict.fromkeys(same, "next_token")), rows


BINS = [[0, 1], [2, 3]]

LOSSES = {
    "value": ValueLoss(clip=0.2),
    "policy": PolicyLoss(dual_clip=3.0, kl_coef=0.1, kl_bound=0.1),
    "policy, sequence_token": PolicyLoss(ratio="sequence_token"),
    "cispo": CISPOLoss(),
    "gmpo": GMPOLoss(clip_low=0.2, clip_high=0.2),
    "engine": PolicyLoss(engine_ratio_min=0.8, engine_ratio_cap=1.25, engine_correction="mask"),
}
SHARES = (
    "clip_share clip_fraction dual_clip_fraction ratio_bounded engine_ratio_bounded engine_ratio_outside ref_kl_bounded"
)


@pytest.mark.parametrize("name", LOSSES)
def test_no_token_is_clipped_where_all_are_inside(name: str) -> None:
    data, rows = moved(samples(), 0.18)
    metrics = run(LOSSES[name], data, BINS, torch.float32, rows)[2]
    shares = {key: value for key, value in metrics.items() if key in SHARES.split()}
    assert shares and not any(shares.values()), shares


@pytest.mark.parametrize("clip", [0.2, 0.01])
def test_the_share_of_clipped_values_is_that_of_values_beyond_the_range(clip: float) -> None:
    """In fp32, beside a count in fp64: values on the far side of the range, whose clipped error is larger."""
    data, rows = moved(samples(), 3 * clip)
    values, old, returns = (x.double() for x in (rows[:, 0], data["old_values"], data["returns"]))
    limited = torch.minimum(torch.maximum(values, old - clip), old + clip)
    beyond = ((values - old).abs() > clip) & ((limited - returns).abs() > (values - returns).abs())
    share = float(beyond[counted_rows(data)].double().mean())
    assert 0 < share < 1
    found = run(ValueLoss(clip=clip), data, BINS, torch.float32, rows)[2]["clip_share"]
    assert found == pytest.approx(share, abs=1e-7)
