"""KTO: mismatched responses, the reference point over all ranks, and errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.losses.formulas import BINS, close, formula, run
from tests.losses.waves import batch, wave
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.loss

HERE = "tests.losses.test_unpaired:"


def responses() -> Any:
    """The waves' samples with a prompt of one to three tokens each, then counted tokens with a hole."""
    data = batch()
    place = torch.cat([torch.arange(n) for n in data.lengths.tolist()])
    prompts = torch.repeat_interleave(1 + torch.arange(len(data)) % 3, data.lengths)
    prompts = torch.where(torch.repeat_interleave(data.lengths, data.lengths) == 3, 1, prompts)
    mask = (place >= prompts) & ((place - prompts) % 4 != 2)
    return data.with_fields({"response_mask": mask}, {"response_mask": "token"})


def measured(point: float = 0.4) -> Any:
    data = responses()
    fields = {"desirable": data["chosen"], "reference_point": torch.full((len(data),), point, dtype=torch.float64)}
    return data.with_fields(fields, dict.fromkeys(fields, "sample"))


def test_kto_equals_its_formula_for_any_placement_of_samples() -> None:
    from roll_batching.losses import KTOLoss

    data = measured()
    loss = KTOLoss(beta=0.2, desirable_weight=1.3, undesirable_weight=0.6)

    def of_one(f: Any, lp: Any, h: Any) -> Any:
        gain = (lp - f["ref_log_probs"]).sum()
        if f["desirable"]:
            return 1.3 * (1 - torch.sigmoid(0.2 * (gain - 0.4)))
        return 0.6 * (1 - torch.sigmoid(0.2 * (0.4 - gain)))

    expected = formula(data, of_one, lambda parts: sum(parts) / len(parts))
    close(run(loss, data), expected)
    close(run(loss, data, BINS[::-1]), expected)
    metrics = run(loss, data)[2]
    assert metrics["reference_point"] == pytest.approx(0.4)
    assert metrics["desirable_reward"] != pytest.approx(metrics["undesirable_reward"])


def test_mismatched_samples_are_each_prompt_with_the_response_before() -> None:
    from roll_batching.losses import mismatched

    data = responses()
    other = mismatched(data)
    texts, masks = data.to_lists("input_ids"), data.to_lists("response_mask")
    at = [int(mask.nonzero()[0]) for mask in masks]
    for i in range(len(data)):
        assert other.to_lists("input_ids")[i].tolist() == [*texts[i][: at[i]], *texts[i - 1][at[i - 1] :]]
        assert other.to_lists("response_mask")[i].tolist() == [*masks[i][: at[i]], *masks[i - 1][at[i - 1] :]]
    assert other.ids.tolist() == data.ids.tolist()


def points(_: Any) -> tuple[float, float, float]:
    """The point of this rank's share of the samples, of all, and of responses that lost."""
    from types import SimpleNamespace

    import torch.distributed as dist

    from roll_batching.losses import reference_point

    dist.init_process_group("gloo")
    data = batch()
    gains = {"log_probs": wave(1.9, 0.6, -1.6), "ref_log_probs": wave(2.1, 0.6, -2)}
    data = data.with_fields(gains, dict.fromkeys(gains, "next_token"))
    rank = dist.get_rank()
    layout: Any = SimpleNamespace(host_group=dist.group.WORLD, is_replica_leader=rank < 2)
    mine = data.select([0, 3, 4] if rank == 0 else [1, 2, 5, 6, 7])  # ranks 1 and 2 are one replica
    alone: Any = SimpleNamespace(host_group=None, is_replica_leader=True)
    lost = data.with_fields({"log_probs": gains["log_probs"] - 3}, {"log_probs": "next_token"})
    return reference_point(mine, layout), reference_point(data, alone), reference_point(lost, alone)


def test_the_reference_point_is_the_mean_over_all_ranks_and_never_negative() -> None:
    for share, all_at_once, lost in run_ranks(3, HERE + "points"):
        assert share == pytest.approx(all_at_once, rel=1e-12)
        assert all_at_once == pytest.approx(TRL_POINT, rel=1e-9)
        assert lost == 0


TRL_POINT = 0.682342676424867
"""`kl` of the lines of TRL's KTOTrainer (f2cd577, trl/trainer/kto_trainer.py), on the same rows."""


def test_errors_of_kto() -> None:
    from roll_batching.errors import DataError, LossError
    from roll_batching.losses import KTOLoss, mismatched

    with pytest.raises(DataError, match="sample field 'reference_point'"):
        run(KTOLoss(), measured().without(["reference_point"]), BINS)
    with pytest.raises(LossError, match="undesirable_weight is -1; .* at least 0"):
        KTOLoss(undesirable_weight=-1)
    whole = torch.ones(batch().num_tokens, dtype=torch.bool)
    with pytest.raises(DataError, match=r"samples \[0, 10, .* have no prompt or no counted response token"):
        mismatched(batch().with_fields({"response_mask": whole}, {"response_mask": "token"}))
    with pytest.raises(DataError, match="at least two"):
        mismatched(responses().select([0]))
