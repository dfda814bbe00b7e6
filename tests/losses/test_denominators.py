"""What losses are divided by is counted over the whole mini-batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.losses.formulas import batch

pytestmark = pytest.mark.loss


def test_a_total_covers_what_the_first_mask_counts() -> None:
    from roll_batching.losses.denominators import local_counts

    data = batch()
    everything = torch.ones(data.num_tokens)
    data = data.with_fields({"everything": everything}, {"everything": "token"})
    counts = local_counts(data, ("response_mask", "everything"), ("weights", "token_advantages"))
    assert counts.tokens["everything"] == int(data.lengths.sum()) - len(data)
    masks = [m[1:].bool() for m in data.to_lists("response_mask")]
    present = np.array([bool(m.any()) for m in masks])
    assert counts.sums["weights"] == pytest.approx(float(data["weights"][present].sum()))
    expected = sum(float(a[1:][m].sum()) for a, m in zip(data.to_lists("token_advantages"), masks, strict=True))
    assert counts.sums["token_advantages"] == pytest.approx(expected)
