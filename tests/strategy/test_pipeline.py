"""Pipelines with planned shapes: nothing is exchanged, nothing waits for the device, and every K is possible."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.models import MODES
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.layouts


def _strategy(megatron: dict[str, Any], mode: str = "packed", layers: int = 4) -> Any:
    from roll_batching.strategy import MegatronTrainStrategy
    from tests.support.models import ARCHITECTURE, fill, worker_config

    config = worker_config(mode, 64, megatron=megatron, architecture={**ARCHITECTURE, "num_layers": layers})
    strategy = MegatronTrainStrategy(config)
    strategy.initialize()
    fill(strategy.chunks, 61)
    return strategy


def _batch(count: int = 9) -> Any:
    from tests.support.models import random_batch

    return random_batch(8, count, 40)


def count_exchanges(payload: tuple[dict[str, Any], str]) -> dict[str, int]:
    """Transfers of a training step and a forward pass: activations, shapes (three integers), device syncs."""
    import torch.distributed as dist
    from megatron.core.pipeline_parallel import p2p_communication

    from roll_batching.losses import SFTLoss
    from roll_batching.samples import gather_lengths

    strategy = _strategy(*payload)
    batch = _batch()
    seen = {"activations": 0, "shapes": 0, "syncs": 0, "lengths": 0}
    lengths = set()

    transfer, exchange = p2p_communication._p2p_ops, dist.batch_isend_irecv

    def counted_transfer(**tensors: Any) -> Any:
        sent = [t for name, t in tensors.items() if name.startswith("tensor") and t is not None]
        seen["activations"] += len(sent)
        lengths.update(t.shape[0] for t in sent)
        return transfer(**tensors)

    def counted_exchange(operations: Any) -> Any:  # with unbatched transfers only shapes go through it
        seen["shapes"] += len(operations)
        return exchange(operations)

    def synchronize(*_: Any) -> None:
        seen["syncs"] += 1

    p2p_communication._p2p_ops, dist.batch_isend_irecv = counted_transfer, counted_exchange
    torch.cuda.synchronize = synchronize
    plan = strategy.plan(gather_lengths(batch))
    strategy.train_step(batch, plan, SFTLoss())
    forward = strategy.plan(gather_lengths(batch), forward=True)
    strategy.compute_log_probs(batch, forward)
    seen["lengths"] = len(lengths)
    return seen


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("vpp", [1, 2])
def test_stages_exchange_no_shapes_and_wait_for_no_device(vpp: int, mode: str) -> None:
    megatron = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": vpp if vpp > 1 else None}
    for seen in run_ranks(2, "tests.strategy.test_pipeline:count_exchanges", (megatron, mode)):
        assert seen["shapes"] == 0 and seen["syncs"] == 0
        assert seen["activations"] >= 8
        assert seen["lengths"] > 1  # micro-batches kept their own lengths


def one_step(payload: dict[str, Any]) -> tuple[float, float, int, int]:
    from roll_batching.losses import SFTLoss
    from roll_batching.samples import gather_lengths
    from tests.support.models import whole_gradients

    count = payload.pop("count", 9)
    strategy = _strategy(payload)
    batch = _batch(count)
    plan = strategy.plan(gather_lengths(batch))
    loss = strategy.train_step(batch, plan, SFTLoss()).loss
    gradient = whole_gradients(strategy.chunks, 61, 0, False)["embedding.word_embeddings.weight"]
    return loss, float(gradient.double().norm()), plan.num_micro_batches, plan.group_size or 0


@pytest.mark.parametrize("count", [1, 2, 5, 9])
def test_any_number_of_micro_batches_runs_interleaved(count: int) -> None:
    """`auto` takes the smallest group that Megatron accepts, so no filler is needed to round K up."""
    target = "tests.strategy.test_pipeline:one_step"
    alone = run_ranks(1, target, {"count": count})[0]
    interleaved = {
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
        "microbatch_group_size_per_vp_stage": "auto",
        "count": count,
    }
    found = run_ranks(2, target, interleaved)[0]
    assert found[:2] == pytest.approx(alone[:2], rel=1e-5)
    assert found[2] >= 2 and 2 <= found[3] <= found[2]


def differing_plans(_: None) -> str:
    """A hand-made plan whose count Megatron's interleaved schedule would reject."""
    from roll_batching.errors import PlanError
    from roll_batching.planning import Plan, PlanConstraints

    constraints = PlanConstraints(dp_size=1, max_tokens=64, pp_size=2, vpp_size=2)
    with pytest.raises(PlanError) as caught:
        Plan.from_bins([[[0], [1], [2]]], [4, 5, 6], constraints)
    return str(caught.value)


def test_a_count_that_megatron_rejects_is_an_error_of_the_plan() -> None:
    message = differing_plans(None)
    assert "3 micro-batches per rank are not legal" in message and "the next legal number is 4" in message


def replicas_that_differ(_: None) -> str:
    from roll_batching.errors import RankError
    from roll_batching.losses import SFTLoss
    from roll_batching.samples import gather_lengths

    strategy = _strategy({"pipeline_model_parallel_size": 2})
    batch = _batch()
    plan = strategy.plan(gather_lengths(batch))
    if strategy.layout.pp_rank == 1:
        changed = batch["input_ids"].clone()
        changed[0] += 1
        batch = batch.with_fields({"input_ids": changed}, {"input_ids": "token"})
    with pytest.raises(RankError) as caught:
        strategy.train_step(batch, plan, SFTLoss())
    return str(caught.value)


@pytest.mark.bad_input
def test_ranks_of_one_replica_with_different_samples_are_told_so(report: Any) -> None:
    messages = run_ranks(2, "tests.strategy.test_pipeline:replicas_that_differ")
    assert len(set(messages)) == 1 and "ranks differ in the batch of a replica" in messages[0]
    report(f"ranks of one replica with different samples: {messages[0][:140]}")


def layouts_that_do_not_fit(_: None) -> list[str]:
    from roll_batching.errors import LayoutError, RollBatchingError
    from roll_batching.strategy import MegatronTrainStrategy
    from tests.support.models import worker_config

    said = []
    for megatron in ({"tensor_model_parallel_size": 4}, {"pipeline_model_parallel_size": 2}):
        try:
            strategy = MegatronTrainStrategy(worker_config("packed", 64, megatron=megatron))
            strategy.initialize()
        except RollBatchingError as error:
            assert isinstance(error, LayoutError)
            said.append(str(error))
    first = MegatronTrainStrategy(worker_config("packed", 64))
    try:
        first.initialize()
    except LayoutError as error:
        said.append(str(error))
    return said


@pytest.mark.bad_input
def test_layouts_that_do_not_fit_are_refused_before_anything_runs(report: Any) -> None:
    for said in run_ranks(2, "tests.strategy.test_pipeline:layouts_that_do_not_fit"):
        assert "2 processes cannot be divided into replicas of 4" in said[0]
        assert (
            "parallel state has the layout pp 2 already, and a process has one: a model cannot train in dp 2"
            in said[-1]
        )
    report(f"a world that does not fit the layout: {said[0][:120]}")
    report(f"two layouts in one process: {said[-1][:120]}")
