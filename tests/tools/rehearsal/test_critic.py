"""Rehearsed jobs with a critic: its memory and FLOPs beside the policy's, against real steps and formulas."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from roll_batching.jobs.config import config_from_dict
from roll_batching.tools.rehearsal.advice import candidate_changes, caps_of
from roll_batching.tools.rehearsal.task import CRITIC_GRADIENTS, VALUES
from tests.support.ranks import run_ranks
from tests.tools.rehearsal.jobs import ARCHITECTURE, LIMIT, job_of, task_of, worst_peak
from tests.tools.rehearsal.test_accuracy import SHARDED, TP2, of_the_model, rehearsed

pytestmark = pytest.mark.rehearse

CRITIC = {
    "training_args": {"per_device_train_batch_size": 3},
    "use_sequence_packing": True,
    "sequence_packing_args": {"max_packed_sequence_length_train": 400, "max_packed_sequence_length_forward": 600},
}


def ppo(critic: dict[str, Any] | None = None, **keys: Any) -> dict[str, Any]:
    return job_of(adv_estimator="gae", critic=copy.deepcopy(CRITIC | (critic or {})), **keys)


JOBS: dict[str, tuple[dict[str, Any], int]] = {
    "alone": (ppo(), 1),
    "another shape": (
        ppo({"model_args": {"architecture": {**ARCHITECTURE, "num_layers": 2, "hidden_size": 64}}}),
        1,
    ),
    "TP2, sharded": (ppo(megatron=TP2 | SHARDED), 4),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "alone")) for name in JOBS])
def test_memory_flops_and_collectives_equal_those_of_the_real_step(name: str, report: Any) -> None:
    job, world = JOBS[name]
    target, task = "tests.tools.rehearsal.jobs:measured", task_of(job, world)
    truth, found = run_ranks(world, target, task)[0], rehearsed(task)
    assert set(found.peaks) == set(truth.peaks) > {VALUES, *CRITIC_GRADIENTS, "forward"}
    worst = worst_peak(found, truth, lambda: run_ranks(world, target, task)[0])
    report(f"{name}: peaks of memory within {worst:.2%} of the real step")
    assert worst < LIMIT
    assert found.kept == truth.kept and {"critic weights", "critic gradients", "critic optimizer"} < set(found.kept)
    assert of_the_model(found) == of_the_model(truth)
    assert found.flops == truth.flops
    assert found.tokens["critic training"] == 400 and found.tokens["values"] == 600


def test_flops_and_states_equal_the_formula() -> None:
    """The head has one output: 2 FLOPs per channel and token forward, 4 backward, and no vocabulary."""
    job = ppo({"model_args": {"dtype": "bf16"}})
    job["actor_train"]["model_args"]["dtype"] = "bf16"
    lengths = (150, 130, 120)
    found = rehearsed(task_of(job, 1, device="cuda", lengths=lengths))
    hidden, heads, groups, ffn, vocab, layers = 128, 4, 2, 320, 512, 4
    head_dim, tokens = hidden // heads, sum(lengths)
    layer = hidden * (heads + 2 * groups) * head_dim + heads * head_dim * hidden + 3 * hidden * ffn
    attention = layers * sum(length * (length + 1) // 2 for length in lengths) * heads * head_dim
    weights = layers * layer + hidden
    assert found.flops["critic forward"] == found.micro_batches * (2 * weights * tokens + 4 * attention)
    assert found.flops["critic backward"] == found.micro_batches * (4 * weights * tokens + 10 * attention)
    assert found.flops[VALUES] == found.flops["critic forward"]
    norms = (2 * layers + 1) * hidden
    parameters = layers * layer + norms + vocab * hidden + hidden
    assert found.kept["critic weights"] == pytest.approx(2 * parameters, rel=1e-3)
    assert found.kept["critic optimizer"] == pytest.approx(12 * parameters, rel=1e-3)
    assert found.critic is not None and found.critic.in_step == 1 and found.critic.padding == 0


@pytest.mark.config
def test_caps_and_layouts_of_the_critic_are_searched() -> None:
    config = config_from_dict(ppo(megatron={"use_distributed_optimizer": True}))
    dims = config.actor_train.strategy_args.strategy_config.parallel_dims(4)
    caps = {cap.key: (cap.value, cap.phases) for cap in caps_of(config, dims)}
    prefix = "critic.sequence_packing_args.max_packed_sequence_length_"
    assert caps[f"{prefix}train"] == (400, CRITIC_GRADIENTS) and caps[f"{prefix}forward"] == (600, (VALUES,))
    changes = [change for kind in candidate_changes(config, 4) for change in kind]
    wider = next(change for change in changes if "tensor_model_parallel_size" in str(change))
    changed = wider.of(config)
    assert changed.critic is not None and changed.critic.strategy_args == changed.actor_train.strategy_args
    for role in ("actor_train", "critic"):
        assert wider.settings[f"{role}.training_args.gradient_accumulation_steps"] == 2


@pytest.mark.slow
def test_the_report_has_a_line_for_the_critic(capsys: pytest.CaptureFixture[str]) -> None:
    from roll_batching.cli import main

    with pytest.raises(SystemExit) as end:
        main(["rehearse", "--config", "configs/ppo_demo.yaml", "--verbose", "--gpu-memory", "8GiB"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert "training of the critic, per micro-batch and replica" in text and "critic weights" in text
