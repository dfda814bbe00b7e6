"""Losses of nemo_rl, unmodified, through its own entrance with our passes behind: equal to a plain model's.

Its batches give the same samples.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from roll_batching.integrations.batches import HostForm, make_host_fields, read_host_batch
from tests.hosts import behind, host_nemo_rl, stand_ins
from tests.hosts.layouts import cases, check
from tests.hosts.losses import batch


def test_its_own_packs_share_prefixes() -> None:
    behind.check("nemo_rl")


@pytest.mark.parametrize(("layout", "variant", "steps"), cases(list(host_nemo_rl.VARIANTS)))
def test_a_loss_trains_as_on_a_plain_model(layout: str, variant: str, steps: int) -> None:
    check("nemo_rl", layout, variant, steps)


def test_samples_of_a_batch(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(checkout))
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    stand_ins.install()
    fields = batch()
    data = host_nemo_rl._data(fields)
    forms: dict[str, HostForm] = {
        **dict.fromkeys(("input_ids", "token_mask", "prev_logprobs"), "token"),
        "sample_mask": "sample",
    }
    samples = read_host_batch(data, forms)
    assert samples.lengths.tolist() == fields["lengths"].tolist() and samples["sample_mask"].shape == (len(samples),)
    for row, length in enumerate(samples.lengths.tolist()):
        assert torch.equal(samples.to_lists("prev_logprobs")[row][1:], fields["old"][row, : length - 1])
        assert torch.equal(samples.to_lists("token_mask")[row], fields["response_mask"][row, :length].float())
    for name, written in make_host_fields(samples, data, forms).items():
        assert torch.equal(written, data[name])
