"""Denominators of losses are counted over the whole mini-batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.losses.formulas import batch

pytestmark = pytest.mark.loss


def as_next_token(data):
    """The same batch with every token field as a next_token field; the unused last positions are set."""
    names = [name for name, spec in data.schema.items() if spec.kind == "token" and name != "input_ids"]
    fields = {name: data[name].roll(-1, 0) for name in names}
    for values in fields.values():
        values[data.offsets[1:] - 1] = 1
    return data.with_fields(fields, dict.fromkeys(names, "next_token"))


def test_a_total_covers_the_positions_of_the_first_mask() -> None:
    from roll_batching.losses.denominators import local_counts

    data = batch()
    everything = torch.ones(data.num_tokens)
    data = data.with_fields({"everything": everything}, {"everything": "token"})
    counts = local_counts(data, ("response_mask", "everything"), ("weights", "token_advantages"))
    assert counts.tokens["everything"] == int(data.lengths.sum()) - len(data)
    assert counts.with_vector(counts.vector()) == counts, "the reduced vector is read as it is written"
    masks = [m[1:].bool() for m in data.to_lists("response_mask")]
    present = np.array([bool(m.any()) for m in masks])
    assert counts.sums["weights"] == pytest.approx(float(data["weights"][present].sum()))
    assert counts == local_counts(as_next_token(data), ("response_mask", "everything"), ("weights", "token_advantages"))
    expected = sum(float(a[1:][m].sum()) for a, m in zip(data.to_lists("token_advantages"), masks, strict=True))
    assert counts.sums["token_advantages"] == pytest.approx(expected)


def test_a_mask_counts_the_same_predictions_as_token_and_as_next_token() -> None:
    from roll_batching.losses.denominators import counted_per_sample, local_counts
    from roll_batching.samples.token_fields import counted_positions

    data = batch()
    for kind in (data, as_next_token(data)):
        counted = counted_positions(kind)
        masks = [m[1:].bool().tolist() + [False] for m in data.to_lists("response_mask")]
        assert counted.tolist() == sum(masks, [])
        assert counted_per_sample(kind, "response_mask").tolist() == [sum(m) for m in masks]
    cut = {int(data.ids[row]): 2 + row for row in (0, 2)}  # tokens that are left
    rows = torch.tensor([0, 2, 3])
    found = [
        local_counts(kind, ("response_mask",), ("token_advantages",), cut, rows) for kind in (data, as_next_token(data))
    ]
    assert found[0] == found[1]


def test_prompts_with_the_responses_of_others_are_the_same_by_either_kind_of_mask() -> None:
    from roll_batching.losses import mismatched

    data = batch()
    mask = data["response_mask"].clone()
    mask[data.offsets[:-1]] = False  # a prompt has a token at least
    data = data.with_fields({"response_mask": mask}, {"response_mask": "token"})
    data = data.select([row for row, one in enumerate(data.to_lists("response_mask")) if one.any()])
    assert len(data) > 2
    by_token, by_next = mismatched(data), mismatched(as_next_token(data))
    assert torch.equal(by_token["input_ids"], by_next["input_ids"]) and torch.equal(by_token.lengths, by_next.lengths)
