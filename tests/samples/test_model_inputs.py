"""Which fields enter the forward pass: each of them decides what samples share, and no other field is read there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from roll_batching.errors import DataError
from roll_batching.packing.batch import StepPacks
from roll_batching.planning import PlanConstraints, plan_step
from roll_batching.samples import LengthTable, SampleBatch, find_shared_prefixes
from roll_batching.samples.fields import EXPERTS_SPEC, MODEL_INPUTS, ROUTED_EXPERTS, FieldSpec
from roll_batching.samples.image_fields import GRIDS, IMAGE_SCHEMA, IMAGES, PATCHES, PIXELS
from roll_batching.samples.token_fields import check_shared_rows, inputs_of, token_codes

PROMPT, LENGTHS = 40, (45, 52, 47)
LOSS_FIELDS = {
    "advantages": FieldSpec("sample"),
    "old_log_probs": FieldSpec("next_token"),
    "response_mask": FieldSpec("token"),
    "pair": FieldSpec("sample"),
    "kl_coef": FieldSpec("static"),
}


def batch() -> SampleBatch:
    """Three samples with one prompt of 40 tokens, the same two images and experts, and fields of losses."""
    g = torch.Generator().manual_seed(2)
    prompt = torch.randint(0, 50, (PROMPT,), generator=g)
    experts = torch.rand(max(LENGTHS), 3, 8, generator=g).topk(2).indices.to(torch.int16)
    patches = torch.randint(0, 255, (8, 12), generator=g, dtype=torch.uint8)
    fields: dict[str, Any] = {
        "input_ids": [torch.cat([prompt, 50 + torch.arange(n - PROMPT) + 9 * i]) for i, n in enumerate(LENGTHS)],
        ROUTED_EXPERTS: [experts[:n] for n in LENGTHS],
        PIXELS: [patches] * 3,
        GRIDS: [torch.tensor([[1, 2, 2], [1, 2, 2]])] * 3,
        PATCHES: torch.tensor([8] * 3),
        IMAGES: torch.tensor([2] * 3),
        "advantages": torch.randn(3, generator=g),
        "old_log_probs": [torch.randn(n, generator=g) for n in LENGTHS],
        "response_mask": [torch.rand(n, generator=g) < 0.5 for n in LENGTHS],
        "pair": torch.arange(3),
        "kl_coef": 0.1,
    }
    schema = {"input_ids": FieldSpec("token"), ROUTED_EXPERTS: EXPERTS_SPEC, **IMAGE_SCHEMA, **LOSS_FIELDS}
    return SampleBatch.from_lists(fields, schema)


def shared(samples: SampleBatch) -> list[int]:
    prefixes = find_shared_prefixes(samples, LengthTable.of(samples)).prefixes
    assert prefixes is not None
    return prefixes.shared.tolist()


def changed(samples: SampleBatch, name: str) -> SampleBatch:
    """The samples with another value of `name` in the second: for its token 30, or in its last row."""
    spec = samples.schema[name]
    if name in (IMAGES, PATCHES):  # the second has one image, or three patches, fewer
        rows, fewer = {IMAGES: (GRIDS, 1), PATCHES: (PIXELS, 3)}[name]
        counts = samples[name].clone()
        counts[1] -= fewer
        kept = torch.ones(len(samples[rows]), dtype=torch.bool)
        kept[int(samples[name][:2].sum()) - fewer : int(samples[name][:2].sum())] = False
        return samples.with_fields({name: counts, rows: samples[rows][kept]}, {name: spec, rows: samples.schema[rows]})
    values = samples[name].clone()
    if spec.per_token:
        place = LENGTHS[0] + 30
    elif spec.kind == "sample":
        place = 1
    else:
        place = int(samples.rows_per_sample(name)[:2].sum()) - 1
    values[place] = ~values[place] if values.dtype is torch.bool else values[place] + 1
    return samples.with_fields({name: values}, {name: spec})


def test_equal_inputs_share_the_prompt_whatever_losses_read() -> None:
    assert shared(batch()) == [0, PROMPT - 1, PROMPT - 1]
    for name in ("advantages", "old_log_probs", "response_mask", "pair"):
        assert shared(changed(batch(), name)) == [0, PROMPT - 1, PROMPT - 1], name


def test_every_input_of_the_model_splits_what_is_shared() -> None:
    assert set(batch().schema) == MODEL_INPUTS | set(LOSS_FIELDS), "a new field: add it to this test"
    for name in sorted(MODEL_INPUTS):
        other = changed(batch(), name)
        prefixes = find_shared_prefixes(other, LengthTable.of(other)).prefixes
        assert prefixes is not None
        # The first and the third sample share the prompt still; with the second one they share 29 positions, or none.
        ends = np.sort(prefixes.places[[0, 2]])
        assert prefixes.between(*prefixes.order[ends][:, None]).tolist() == [PROMPT - 1], name
        left = 29 if other.schema[name].per_token else 0
        assert sorted(prefixes.shared.tolist()) == [0, left, PROMPT - 1], name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.bool, torch.int64])
def test_codes_tell_values_of_every_dtype_apart(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A field that a later model reads, of any dtype and kind."""
    monkeypatch.setattr("roll_batching.samples.token_fields.MODEL_INPUTS", MODEL_INPUTS | {"weights"})
    text = batch().only(["input_ids"])
    for kind, count in (("token", text.num_tokens), ("next_token", text.num_tokens), ("sample", 3)):
        values = torch.zeros(count, 2, dtype=dtype)
        equal = text.with_fields({"weights": values}, {"weights": kind})
        values = values.clone()
        values[LENGTHS[0] + 30 if count > 3 else 1, 1] = 1
        other = text.with_fields({"weights": values}, {"weights": kind})
        assert max(shared(equal)) == PROMPT - 1 and sorted(shared(equal))[1] == PROMPT - 1
        assert sorted(shared(other))[1] == (29 if count > 3 else 0), (dtype, kind)


def test_codes_of_token_ids_alone_are_the_ids() -> None:
    text = batch().without([ROUTED_EXPERTS, *IMAGE_SCHEMA])
    assert token_codes(text).dtype == np.int32
    assert np.array_equal(token_codes(text), text["input_ids"].numpy())
    assert token_codes(batch().select([])).shape == (0,)


def test_a_field_that_is_not_declared_does_not_reach_the_forward_pass() -> None:
    types = {"token_types": torch.zeros(sum(LENGTHS), dtype=torch.int64)}
    samples = batch().with_fields(types, {"token_types": "token"})
    with pytest.raises(DataError, match="No field 'token_types'"):
        inputs_of(samples)["token_types"]
    assert set(inputs_of(samples).fields) == MODEL_INPUTS


class Noted(dict[str, Any]):
    """Fields that note which of them are read."""

    def __init__(self, fields: dict[str, Any]) -> None:
        super().__init__(fields)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)


def test_a_stage_without_a_loss_reads_no_other_field() -> None:
    samples = batch().without(list(IMAGE_SCHEMA))
    fields = Noted(samples.fields)
    object.__setattr__(samples, "fields", fields)
    plan = plan_step(samples.lengths.numpy(), PlanConstraints(dp_size=1, max_tokens=400), ids=samples.ids.numpy())
    packs = StepPacks(samples, plan, dp_rank=0, device=torch.device("cpu"), attention="dense", is_last_stage=False)
    fields.read.clear()  # construction looks at the devices of all
    assert len(list(packs)) == 1
    assert fields.read <= MODEL_INPUTS, "read beside inputs_of(batch)"


def _plan(samples: SampleBatch) -> Any:
    table = find_shared_prefixes(samples, LengthTable.of(samples))
    return plan_step(table.lengths, PlanConstraints(dp_size=1, max_tokens=400), ids=table.ids, prefixes=table.prefixes)


def test_plans_are_checked_against_the_samples() -> None:
    plan = _plan(batch())
    assert plan.report.shared_tokens == 2 * (PROMPT - 1)
    check_shared_rows(batch(), plan, 0)
    check_shared_rows(batch().without("input_ids"), plan, 0)  # as a pipeline stage may have it
    for name in sorted(MODEL_INPUTS):
        with pytest.raises(DataError, match=f"share 39 positions with sample .*{name}"):
            check_shared_rows(changed(batch(), name), plan, 0)


def test_the_first_label_behind_shared_positions_is_checked_too() -> None:
    samples = batch().only(["input_ids", "response_mask"])
    plan = _plan(samples)
    ids = samples["input_ids"].clone()
    ids[LENGTHS[0] + PROMPT - 1] += 1  # token 39 of the second sample: the label of position 38
    with pytest.raises(DataError, match="whose token 39 has another value of input_ids"):
        check_shared_rows(samples.with_fields({"input_ids": ids}, {"input_ids": "token"}), plan, 0)


def test_experts_behind_shared_positions_may_differ() -> None:
    """The token behind them is computed for each sample: a pass that records experts finds them by itself."""
    samples = batch().only(["input_ids", ROUTED_EXPERTS])
    plan = _plan(samples)
    experts = samples[ROUTED_EXPERTS].clone()
    experts[LENGTHS[0] + PROMPT - 1] = (experts[LENGTHS[0] + PROMPT - 1] + 1) % 8
    check_shared_rows(samples.with_fields({ROUTED_EXPERTS: experts}, {ROUTED_EXPERTS: EXPERTS_SPEC}), plan, 0)
