"""A device that runs out of memory on one rank: the micro-batch, its tokens and the key to lower are named."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.layouts import Layout
from tests.support.ranks import run_ranks

HERE = "tests.strategy.test_out_of_memory:"
FULL = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB"


def full() -> None:
    import torch

    raise torch.OutOfMemoryError(f"{FULL}. If reserved but unallocated memory is large try setting ...")


def step(case: dict[str, Any]) -> None:
    """A step in which rank 1's loss, layer, or that layer's backward pass, runs out of memory."""
    import torch
    import torch.distributed as dist

    from roll_batching.losses import SFTLoss
    from roll_batching.modeling.head import gpt_of
    from roll_batching.samples import distribute, gather_lengths
    from tests.strategy.test_checkpoint import strategy_of
    from tests.support.models import random_batch

    made = strategy_of({"layout": case["layout"], "fill": True})
    loss: Any = SFTLoss()
    here = dist.get_rank() == 1
    layer = gpt_of(made.chunks[0]).decoder.layers[-1]
    seen: list[int] = []

    def late(*_: Any) -> None:
        seen.append(1)
        if len(seen) > 1:
            full()

    if here and case["where"] == "model":
        layer.register_forward_hook(lambda *_: late())
    if here and case["where"] == "backward":
        layer.register_full_backward_hook(lambda *_: late())
    if here and case["where"] == "optimizer":
        made.optimizer.step = full
    if case["where"] == "loss":

        class Loss(SFTLoss):
            def token_loss(self, tokens: Any) -> Any:
                if here:
                    late()
                return super().token_loss(tokens)

        loss = Loss()
    batch = random_batch(3, 12, 40)
    home = batch.select(list(range(made.layout.dp_rank, 12, made.layout.dp_size)))
    plan = made.plan(gather_lengths(home))
    assert plan.num_micro_batches > 1 and torch.is_grad_enabled()
    made.train_step(distribute(home, plan), plan, loss)


PACKED = "Lower sequence_packing_args.max_packed_sequence_length_train, now 64; or recompute more"


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("where", "layout", "words"),
    [
        ("model", Layout(dp=2), "in the forward pass of micro-batch 2 of "),
        ("backward", Layout(pp=2), "in the backward pass of micro-batch 2 of "),
        pytest.param("loss", Layout(pp=2), "in the forward pass of micro-batch 2 of ", marks=pytest.mark.slow),
        pytest.param("optimizer", Layout(tp=2), "in the optimizer's step: ", marks=pytest.mark.slow),
    ],
)
def test_what_a_rank_was_at_and_what_to_lower(where: str, layout: Layout, words: str, report: Any) -> None:
    case = {"where": where, "layout": layout.megatron()}
    outcome = run_ranks(2, HERE + "step", case, check=False, timeout=120, grace=3)[1]
    said = outcome.output.strip().splitlines()[-1]
    report(f"{where}: {said}")
    assert said.startswith("roll_batching.errors.DeviceMemoryError: rank 1 ran out of device memory " + words), said
    assert FULL in said and "reserved" not in said
    if where == "optimizer":
        assert "use_distributed_optimizer: true" in said
    else:
        assert PACKED in said and " tokens, samples " in said
