"""Metrics keep their kind when joined over micro-batches, ranks and steps."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.loss


def test_metrics_join_by_their_kind_in_any_order() -> None:
    from roll_batching.errors import LossError
    from roll_batching.losses import Max, Mean, Min, Sum
    from roll_batching.losses.contract import HostMetric, as_numbers, join_parts, to_host

    def part(value: float, tokens: float) -> dict[str, HostMetric]:
        x = torch.tensor(value)
        kinds = {"sum": Sum(x), "mean": Mean(x * tokens, torch.tensor(tokens)), "max": Max(x), "min": Min(x)}
        return to_host([], [kinds])[1]

    parts = [part(2.0, 3.0), part(-1.0, 1.0), part(5.0, 4.0)]
    for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
        joined = join_parts([parts[i] for i in order])
        assert as_numbers(joined) == {"sum": 6.0, "mean": 25 / 8, "max": 5.0, "min": -1.0}
    assert as_numbers(join_parts([part(7.0, 0.0)]))["mean"] == 0.0, "a mean over nothing"
    with pytest.raises(LossError, match="'x' is a sum in one part and a max in another"):
        join_parts([{"x": parts[0]["sum"]}, {"x": parts[0]["max"]}])
