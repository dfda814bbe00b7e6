"""Losses of verl, unmodified, through its own entrance with our passes behind: equal to a plain model's.

Its batches, as its trainer makes and converts them, give the same samples.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from roll_batching.integrations.batches import HostForm, make_host_fields, read_host_batch
from tests.hosts import behind, host_verl, stand_ins, verl_trainer
from tests.hosts.layouts import cases, check


def test_its_own_packs_share_prefixes() -> None:
    behind.check("verl")


@pytest.mark.parametrize(("layout", "variant", "steps"), cases(list(host_verl.VARIANTS)))
def test_a_loss_trains_as_on_a_plain_model(layout: str, variant: str, steps: int) -> None:
    check("verl", layout, variant, steps)


def test_batches_of_trainer_and_engine_hold_the_same_samples(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(checkout))
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    stand_ins.install()
    from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

    fields = verl_trainer.make_fields()
    proto = verl_trainer.make_batch(fields)
    forms: dict[str, HostForm] = {"input_ids": "token", "ref_log_prob": "response", "response_mask": "response"}
    batch = read_host_batch(proto, forms)
    assert batch.lengths.tolist() == fields["lengths"].tolist()
    for row, length in enumerate(batch.lengths.tolist()):
        assert torch.equal(batch.to_lists("input_ids")[row], fields["input_ids"][row, :length])
        assert torch.equal(batch.to_lists("response_mask")[row], fields["response_mask"][row, :length])
        assert torch.equal(batch.to_lists("ref_log_prob")[row][1:], fields["ref"][row, : length - 1])
    converted = left_right_2_no_padding(proto.to_tensordict())
    again = read_host_batch(converted, forms)
    assert all(torch.equal(again[name], batch[name]) for name in forms)
    for name, written in make_host_fields(batch, proto, forms).items():
        assert torch.equal(written, proto.batch[name])
    # verl reads an engine's output at the token before: the form of next tokens.
    rows = make_host_fields(batch, converted, {"ref_log_prob": "next_token"})["ref_log_prob"]
    assert torch.equal(no_padding_2_padding(rows, converted), proto.batch["ref_log_prob"])
