"""No device synchronisation between a step's packing and its end: host reads of device values are counted."""

from __future__ import annotations

import collections
import traceback
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.losses.steps import make_strategy, step
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.loss

HERE = "tests.losses.test_hot_path:"
ASKED = {"item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__"}
WAITING = {
    # operators whose output depends on device values, so that the host must wait for them
    "_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive",
    "repeat_interleave", "equal", "is_nonzero",
}  # fmt: skip
ALLOWED = {
    # Megatron 0.16.1 compares the step's token count on the host, once per chunk and step.
    "finalize_model_grads",
    # Megatron's random-state tracker compares two states of the host's generator, which are host tensors everywhere.
    "fork",
}
PACKING = ("packing/batch.py", "_make")
"""Packs are made on the host, of host tensors; on a CPU when asked for, on CUDA by a thread (packing/prefetch.py)."""


class Reads(TorchFunctionMode):
    """Counts Python calls that read a device value, by the calling function."""

    def __init__(self) -> None:
        super().__init__()
        self.found: collections.Counter[str] = collections.Counter()

    def note(self, what: str) -> None:
        frames = [f for f in traceback.extract_stack() if "/torch/" not in f.filename and __file__ != f.filename]
        packing = any(f.filename.endswith(PACKING[0]) and f.name == PACKING[1] for f in frames)
        if not packing and not any(f.name in ALLOWED for f in frames):
            self.found[f"{what} in {frames[-1].name} ({frames[-1].filename.split('/')[-1]}:{frames[-1].lineno})"] += 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ASKED:
            self.note(name)
        if name == "__getitem__" and any(
            isinstance(i, torch.Tensor) and i.dtype is torch.bool
            for i in (args[1] if isinstance(args[1], tuple) else (args[1],))
        ):
            self.note("indexing by a mask")
        return func(*args, **(kwargs or {}))


class Waits(TorchDispatchMode):
    """Counts operators that synchronise the device, also those called by C++, as in backward."""

    def __init__(self, reads: Reads) -> None:
        super().__init__()
        self.reads = reads

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[-1]
        if name in WAITING and not (name == "repeat_interleave" and (kwargs or {}).get("output_size") is not None):
            self.reads.note(name)
        return func(*args, **(kwargs or {}))


def _losses() -> dict[str, Any]:
    from roll_batching.losses import (
        CISPOLoss,
        ClipCovLoss,
        DPOLoss,
        GMPOLoss,
        IPOLoss,
        KlCovLoss,
        KTOLoss,
        LossOutput,
        PolicyLoss,
        SAPOLoss,
        SFTLoss,
        TOPRLoss,
    )
    from tests.losses.test_partitions import Both

    class BySequence:
        masks = ("response_mask",)

        def sequence_loss(self, s: Any) -> Any:
            x = s["advantages"] * s.log_probs() - 0.01 * s.entropy()
            return LossOutput(s.mean(x) + s.sequence_mean(x), {"x": s.mean_metric(x)})

    class Whole(BySequence):
        gather_cp = True

    class Careless:
        masks, needs = ("response_mask",), {"log_probs"}

        def token_loss(self, tokens: Any) -> Any:
            loss = tokens.mean(tokens.log_probs[tokens.mask()].sum() * tokens.log_probs)
            if loss.item() > 1e9 or loss > 0:
                loss = loss * 2
            return LossOutput(loss)

    every = {"kl_coef": 0.1, "entropy_coef": 0.1, "dual_clip": 3.0, "engine_ratio_cap": 2.0}
    return {
        "policy": PolicyLoss(**every, sample_weights="weights", aggregation="sequence_mean"),
        "gspo": PolicyLoss(ratio="sequence"),
        "cispo, sapo": Both(
            CISPOLoss(engine_correction="mask", engine_ratio_cap=1.2, kl_coef=0.1, kl_gradient="straight_through"),
            SAPOLoss(engine_correction="mask_sequences", engine_ratio_cap=1.2),
        ),
        "gmpo, topr": Both(GMPOLoss(), TOPRLoss()),
        "clip_cov, kl_cov": Both(ClipCovLoss(), KlCovLoss()),
        "sft": SFTLoss(),
        "kto": KTOLoss(desirable_weight=2.0),
        "dpo": DPOLoss(),
        "ipo": IPOLoss(average_log_probs=True, sft_coef=0.1),
        "sequences": BySequence(),
        "whole sequences": Whole(),
        "careless": Careless(),
    }


def count_reads(megatron: dict[str, Any]) -> dict[str, dict[str, int]]:
    from roll_batching.samples import gather_lengths
    from tests.losses.steps import mine
    from tests.losses.test_partitions import batch

    strategy = make_strategy(cap=96, megatron=megatron)
    run, found = strategy._run, {}
    reads = Reads()

    def watched(*args: Any, **kwargs: Any) -> Any:
        with reads, Waits(reads):
            return run(*args, **kwargs)

    strategy._run = watched
    data = batch()
    plan = strategy.plan(gather_lengths(mine(strategy, data)), group_ids=_pairs(strategy, data))
    for name, loss in _losses().items():
        reads.found.clear()
        step(strategy, data, loss, plan)
        found[name] = dict(reads.found)
    return found


def _pairs(strategy: Any, data: Any) -> Any:
    from roll_batching.samples import gather_lengths
    from tests.losses.steps import mine

    ids = gather_lengths(mine(strategy, data)).ids
    rows = data.rows_of(ids)
    return data["pair"][rows].numpy()


@pytest.mark.parametrize("layout", ["one rank", "tensor 2, sequence parallel", "context 2", "mean of micro-batches"])
def test_no_device_value_is_read_before_the_steps_end(layout: str, report) -> None:
    ranks, megatron = {
        "one rank": (1, {}),
        "tensor 2, sequence parallel": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
        "context 2": (2, {"context_parallel_size": 2}),
        "mean of micro-batches": (1, {"calculate_per_token_loss": False, "recompute_granularity": "full"}),
    }[layout]
    for found in run_ranks(ranks, HERE + "count_reads", megatron):
        careless = found.pop("careless")
        assert {name: reads for name, reads in found.items() if reads} == {}
    kinds = {key.split(" in ")[0] for key in careless}
    assert {"item", "__bool__", "indexing by a mask"} <= kinds, "the counter sees what a careless loss does"
    report(f"host reads before the step's end, {layout}: 0 in {len(found)} losses ({sum(careless.values())} careless)")
