"""The check of losses finds the faults that losses have, and passes the right ones."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from roll_batching.errors import DataError, LossError
from roll_batching.jobs.config.losses import LOSSES
from roll_batching.loss_check import LossCheck
from roll_batching.loss_check.report import compare, gradient_norm
from roll_batching.loss_check.scenarios import Outcome
from roll_batching.losses import check_loss
from tests.loss_check import wrong_losses as losses
from tests.support.commands import run_command

pytestmark = pytest.mark.loss

TP, CP, CP_PADDED, DP = (
    "tensor parallel size 2",
    "context parallel size 2",
    "context parallel size 2, padded",
    "data parallel size 2",
)
ONE, MANY = "1 micro-batch instead of 4", "12 micro-batches instead of 4"
ORDER, SAMPLES = "the order of the micro-batches", "the order of the samples in a micro-batch"
AGAIN, PADDED = "nothing: the same step again", "padded instead of packed"


def row(result: Any, changed: str) -> Any:
    return next(row for row in result.rows if row.changed == changed)


def test_a_gradient_that_tensor_parallelism_doubles() -> None:
    """With torch's differentiable all-reduce: the loss is equal, and nothing else would tell."""
    result = check_loss(losses.TorchAllReduce())
    assert result.changes == (TP,) and not result.ok
    assert row(result, TP).loss == "equal" and row(result, TP).gradient == "x 2" and not row(result, TP).metrics
    assert "view.vocabulary" in str(result)


def test_a_mean_per_micro_batch() -> None:
    result = check_loss(losses.MeanPerMicroBatch())
    assert {ONE, MANY} <= set(result.changes) and not {TP, CP, DP, PADDED, ORDER, SAMPLES, AGAIN} & set(result.changes)
    assert "equal" not in (row(result, ONE).loss, row(result, ONE).gradient)


def compared(loss: float, metric: float, gradient: float, *others: tuple[float, float, float]) -> LossCheck:
    """The check of a first run, and others, with these numbers."""
    first, *runs = (
        Outcome(loss=a, metrics={"m": b}, gradients={"w": torch.tensor([c])})
        for a, b, c in ((loss, metric, gradient), *others)
    )
    rows = tuple(compare("the order", "", run, first) for run in runs)
    return LossCheck(name="Own", loss=loss, metrics={"m": metric}, gradient_norm=gradient_norm(first), rows=rows)


@pytest.mark.parametrize(
    ("numbers", "problem"),
    [
        ((1.0, 1.0, 0.0), "the gradient is 0"),
        ((1.0, math.nan, 1.0), "the metric m is nan"),
        ((math.inf, 1.0, 1.0), "the loss is inf"),
        ((1.0, 1.0, math.nan), "the gradient norm is nan"),
    ],
)
def test_runs_that_prove_nothing_are_not_ok(numbers: tuple[float, float, float], problem: str) -> None:
    check = compared(*numbers, numbers)
    assert not check.ok and not check.changes and f"prove nothing: {problem}" in str(check)


@pytest.mark.parametrize("scale", [1e-6, 1.0])
def test_small_numbers_are_compared_by_the_size_of_the_run(scale: float) -> None:
    assert compared(scale, 0.0, scale, (scale * (1 + 1e-6), scale * 1e-7, scale)).ok
    assert not compared(scale, 0.0, scale, (scale * 1.001, 0.0, scale)).ok
    assert not compared(scale, 1e-6 * scale, scale, (scale, 4e-6 * scale, scale)).ok
    assert compared(1e-9 * scale, 0.0, scale, (1e-7 * scale, 0.0, scale)).ok, "its terms cancel"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("ForgottenExpand", {TP}),
        ("OwnShardOnly", {TP}),
        ("SumOverContextRanks", {CP, CP_PADDED}),
        ("WholeSequencesAreAssumed", {CP, CP_PADDED}),
        ("SumOfMeans", {ONE, MANY}),
        ("MeanOfMeans", {ONE, MANY}),
        ("MaximumOfSums", {ONE, MANY}),
        ("FillerCounts", {PADDED, CP_PADDED}),
        ("NeighboursArePairs", {MANY, SAMPLES}),
        ("RunningMean", {ONE, MANY, ORDER, DP}),
        ("Random", {AGAIN}),
        ("host_loss_by_rows", {ONE, MANY}),
    ],
)
def test_other_faults(name: str, changes: set[str]) -> None:
    result = check_loss(getattr(losses, name)())
    assert changes <= set(result.changes), str(result)
    if name in ("ForgottenExpand", "OwnShardOnly", "SumOfMeans", "MaximumOfSums"):
        assert changes == set(result.changes), str(result)
    if name in ("SumOfMeans", "MeanOfMeans", "MaximumOfSums"):
        changed = [one for one in result.rows if not one.ok]
        assert all(one.loss == one.gradient == "equal" and len(one.metrics) == 1 for one in changed)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["OwnPairs", "Prepared", "WholeRows", "ByPublicFunction", "Critic", "host_loss"])
def test_right_losses_of_other_kinds(name: str) -> None:
    result = check_loss(getattr(losses, name)())
    assert result.ok, str(result)


SETTINGS: dict[str, dict[str, Any]] = {
    "policy": {"kl_coef": 0.1, "entropy_coef": 0.02, "dual_clip": 3.0},
    "topr": {"sample_weights": None},
    "clip_cov": {"share": 0.2, "lowest": -5.0},
    "kl_cov": {"share": 0.2},
    "dpo": {"sft_coef": 0.1},
    "distill": {"objective": "js_divergence", "weight": 0.7},
}


@pytest.mark.parametrize(
    "name", [pytest.param(entry.name, marks=[pytest.mark.slow] * (entry.name != "dpo")) for entry in LOSSES]
)
def test_every_loss_of_the_package_passes(name: str, report: Any) -> None:
    make = LOSSES.load(name)
    fields = {field.name for field in dataclasses.fields(make)}
    loss = make(**{key: value for key, value in SETTINGS.get(name, {}).items() if key in fields})
    result = check_loss(loss)
    assert result.ok, str(result)
    assert result.gradient_norm > 1e-3
    report(f"check_loss, {name}: {len(result.rows)} runs equal the first")


@pytest.mark.slow
def test_the_losses_of_critics_pass() -> None:
    from roll_batching.losses import ValueLoss

    result = check_loss(ValueLoss(clip=0.2))
    assert result.ok, str(result)


@pytest.mark.slow
def test_a_loss_that_fails_in_one_layout_is_named_there() -> None:
    result = check_loss(losses.FailsUnderContextParallelism())
    assert set(result.changes) == {CP, CP_PADDED}
    assert "out of bounds" in str(row(result, CP).error) and "wrong_losses.py" in str(row(result, CP).error)


@pytest.mark.slow
def test_a_loss_that_waits_for_ever_ends() -> None:
    result = check_loss(losses.WaitsForOthers())
    assert CP in result.changes and row(result, CP).error


@pytest.mark.bad_input
def test_what_cannot_be_checked_is_refused() -> None:
    with pytest.raises(LossError, match="is the class TorchAllReduce: pass an instance"):
        check_loss(losses.TorchAllReduce)

    class Local(losses.ByTokens):
        def token_loss(self, tokens: Any) -> Any: ...

    with pytest.raises(LossError, match="Local cannot be sent to the processes of the check .*top of a module"):
        check_loss(Local())
    with pytest.raises(LossError, match="has the kind 'word': give token, next_token or sample"):
        check_loss(losses.NeedsMargin(), fields={"margin": "word"})  # type: ignore[dict-item]
    with pytest.raises(DataError, match="group_by needs the sample field 'margin'"):
        check_loss(losses.NeedsMargin(), group_by="margin")


HERE = "tests.loss_check.wrong_losses:"


def test_the_command_takes_fields_and_says_which_are_missing() -> None:
    missing = run_command("check-loss", HERE + "NeedsMargin")
    assert missing.returncode == 1 and "the field 'margin'" in missing.stderr and "--field" in missing.stderr
    done = run_command("check-loss", HERE + "NeedsMargin", "--field", "margin=sample")
    assert done.returncode == 0 and "The loss is the same in every run." in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_the_command_takes_settings_and_fails_for_a_wrong_loss() -> None:
    done = run_command("check-loss", "policy", "clip_high=0.3", "aggregation=sequence_mean")
    assert done.returncode == 0, done.stdout + done.stderr
    wrong = run_command("check-loss", HERE + "TorchAllReduce")
    assert wrong.returncode == 1 and "x 2" in wrong.stdout
    assert wrong.stderr.splitlines()[-1] == "error: TorchAllReduce changes with tensor parallel size 2"


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["policy", "clip_hihg=0.3"], "clip_high"),
        (["policy", "clip_high"], "write NAME=VALUE"),
        (["policy", "kl_coef=-1"], "kl_coef: input should be greater than or equal to 0"),
        (["polic"], "is unknown"),
        ([HERE + "Nothing"], "has no 'Nothing'"),
        ([HERE + "number"], "name a class of losses"),
        (["sft", "--field", "margin"], "write NAME=KIND"),
    ],
)
def test_wrong_commands_are_refused(arguments: list[str], said: str) -> None:
    done = run_command("check-loss", *arguments)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr, done.stderr
