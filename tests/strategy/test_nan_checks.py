"""Weights that are not finite, and steps that make them so: named where their outputs first appear, on all ranks."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.jobs.rl.jobs import settings, write_data
from tests.support.layouts import Layout
from tests.support.ranks import run_ranks

HERE = "tests.strategy.test_nan_checks:"


# ---- on ranks


def outputs(payload: dict[str, Any]) -> dict[str, str]:
    """What each pass says of a weight of this value, which rank 1 alone holds."""
    import torch.distributed as dist

    from roll_batching.errors import RollBatchingError
    from roll_batching.losses import SFTLoss
    from roll_batching.samples import distribute, gather_lengths
    from roll_batching.strategy import GenerationSettings
    from tests.strategy.test_checkpoint import strategy_of
    from tests.support.models import random_batch

    made = strategy_of({"fill": True, "layout": payload["layout"]})
    if dist.get_rank() == 1:
        name, weight = list(made.chunks[0].named_parameters())[-1]
        assert name.endswith(payload["name"]), name
        weight.data.view(-1)[3] = float(payload["value"])
    batch = random_batch(0, 6, 24)
    home = batch.select(list(range(made.layout.dp_rank, 6, made.layout.dp_size)))
    plan = made.plan(gather_lengths(home))
    local = distribute(home, plan)
    sampling = GenerationSettings(max_new_tokens=4, eos_token_id=1)
    said = {}
    for what, act in {
        "generate": lambda: made.generate(home.only(["input_ids"]), sampling),
        "log-probs": lambda: made.compute_log_probs(local, plan),
        "step": lambda: made.train_step(local, plan, SFTLoss()),
    }.items():
        try:
            act()
        except RollBatchingError as error:
            said[what] = f"{type(error).__name__}: {error}"
    return said


# ---- tests


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("layout", "value"),
    [
        (Layout(tp=2).megatron(), "nan"),
        pytest.param(Layout(dp=2).megatron() | {"use_distributed_optimizer": True}, "inf", marks=pytest.mark.slow),
    ],
    ids=["tp, nan", "dp, inf"],
)
def test_a_weight_that_is_not_finite_is_named_by_every_pass(layout, value, report):
    payload = {"layout": layout, "value": value, "name": "output_layer.weight"}
    first, second = run_ranks(2, HERE + "outputs", payload)
    assert first == second and first.keys() == {"generate", "log-probs", "step"}, first
    for what, words in first.items():
        report(f"{what}: {words}")
        assert "1 values of the weight output_layer.weight are not finite" in words, words
        kind = r"loss is nan for sample" if what == "step" else r"log_probs is nan for sample \d+ at token \d+"
        assert re.search(kind, words), words


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "training",
    [{"learning_rate": 1e30}, pytest.param({"learning_rate": 1e37}, marks=pytest.mark.slow)],
    ids=["huge", "infinite"],
)
def test_a_job_whose_steps_ruin_the_weights_says_so(tmp_path, report, training):
    """In the step after: in its rollouts, or in their log-probs."""
    write_data(tmp_path)
    job = settings(tmp_path, warmup=None, reward_function="tests.jobs.rl.jobs:length", max_steps=4)
    job["actor_train"]["training_args"] |= training
    for words in run_ranks(2, "tests.jobs.run.test_resume_changes:endings", {"it": job}):
        report(words["it"])
        assert re.search(r"(log_probs|the loss) is nan for sample.*(not finite|the largest \()", words["it"]), words
        assert "lower learning_rate" in words["it"]
