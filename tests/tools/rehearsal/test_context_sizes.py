"""Rehearsals of jobs whose packs have their own context-parallel sizes: the sizes of the plan, one rank of each."""

from __future__ import annotations

from typing import Any

import pytest

from roll_batching.jobs.config import ConfigFileError, config_from_dict
from roll_batching.planning import ParallelDims, PlanConstraints, plan_step
from roll_batching.settings.model_cost import architecture_pack_times
from roll_batching.tools.rehearsal.job import context_sizes, rehearse_job, totals_of
from roll_batching.tools.rehearsal.report import lines_of, report_json
from tests.tools.rehearsal.jobs import ARCHITECTURE, job_of

pytestmark = pytest.mark.rehearse

AUTO = {"context_parallel_size": "auto", "cluster": {"layer_floor": 1e-5}}
PAIRS = {"training_args": {"per_device_train_batch_size": 2}}
BF16 = {"model_args": {"architecture": ARCHITECTURE, "dtype": "bf16"}}
LENGTHS = [1500, 1400, 700, 650, *range(30, 230, 10)]


def job(megatron: dict[str, Any], **keys: Any) -> Any:
    return config_from_dict(job_of(task="sft", sequence_length=1500, megatron=megatron, **keys))


@pytest.mark.slow
def test_one_rank_of_each_size_of_the_plan_is_rehearsed() -> None:
    config = job(AUTO, train=BF16)
    architecture = config.actor_train.model_args.architecture
    assert architecture is not None
    rates = config.actor_train.strategy_args.strategy_config.cluster
    assert rates is not None
    constraints = PlanConstraints(dp_size=4, max_tokens=512, max_cp_size=4)
    plan = plan_step(
        LENGTHS, constraints, times=architecture_pack_times(architecture, constraints, cluster=rates.rates)
    )
    fullest: dict[int, int] = {}
    packs = {(mb.ranks, k): mb for rank in plan.micro_batches for k, mb in enumerate(rank) if not mb.is_filler}
    for mb in packs.values():
        fullest[mb.cp_size] = max(fullest.get(mb.cp_size, 0), mb.tokens)
    assert {1, 4} <= set(fullest)

    found = rehearse_job(config, world_size=4, lengths=LENGTHS)
    assert found.cp_sizes == tuple(sorted(fullest))
    for stage in found.stages:
        assert stage.cp_size is not None and stage.report.tokens["training"] == fullest[stage.cp_size]
        own = {key.split(" / ")[1] for key in stage.report.collectives if "CONTEXT_PARALLEL_GROUP_" in key}
        size = stage.cp_size
        assert own == (set() if size == 1 else {f"CONTEXT_PARALLEL_GROUP_{size} ({size})"})
        # The rank has the communicators of all sizes, and that of gradients; the others have one rank.
        assert stage.communicators == len([one for one in fullest if one > 1]) + 1
        totals = totals_of(found, size)
        assert totals.micro_batches == sum(1 for mb in packs.values() if mb.cp_size == size)
        assert 0.5 < totals.useful < 1
    text = "\n".join(lines_of(found, 80 << 30))
    assert "each pack has its own context-parallel size" in text
    for size, tokens in fullest.items():
        assert f"  CP {size}: micro-batches of {tokens:,} tokens (training)" in text
        assert f"training, per micro-batch of CP {size}: " in text
    shown = report_json(found, 80 << 30)
    assert [one["cp_size"] for one in shown["training"]] == list(found.cp_sizes)
    assert found.fits(80 << 30) and not found.fits(1 << 30)


def test_without_lengths_every_legal_size_is_rehearsed() -> None:
    dims = ParallelDims(dp_size=8)
    assert context_sizes(job({"context_parallel_size": "auto"}), dims, None) == [1, 2, 4, 8]
    bounded = {"context_parallel_size": "auto", "max_context_parallel_size": 2}
    assert context_sizes(job(bounded), dims, None) == [1, 2]
    assert context_sizes(job({}), dims, None) == [None]


@pytest.mark.bad_input
def test_what_cannot_be_rehearsed_is_named() -> None:
    with pytest.raises(ConfigFileError, match="auto gives packs sizes up to the number of ranks, which is unknown"):
        rehearse_job(job({"context_parallel_size": "auto"}), device="cpu")
    bounded = {"context_parallel_size": "auto", "max_context_parallel_size": 2}
    other = {"strategy_args": {"strategy_config": bounded}, "use_sequence_packing": True}
    pairs = config_from_dict(
        job_of(
            task="dpo",
            sequence_length=200,
            megatron=AUTO,
            reference=other,
            train={"training_args": {"per_device_train_batch_size": 2}},
        )
    )
    with pytest.raises(ConfigFileError, match=r"reference.*max_context_parallel_size: differs from actor_train's"):
        rehearse_job(pairs, world_size=4, device="cpu")
    with pytest.raises(ConfigFileError, match="max_context_parallel_size is 4: it must be a power of two that divides"):
        rehearse_job(job(AUTO | {"max_context_parallel_size": 4}), world_size=2, device="cpu")
