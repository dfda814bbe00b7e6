"""Where prefixes are shared: found over all ranks, refused by name where a model cannot, off where it saves little."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.ranks import run_ranks

HERE = "tests.strategy.test_prefix_sharing:"


def batch(prompt: int = 40, answers: tuple[int, ...] = (5, 9, 7, 3), groups: int = 3) -> Any:
    from roll_batching.samples import SampleBatch

    g = torch.Generator().manual_seed(1)
    rows = []
    for _ in range(groups):
        start = torch.randint(0, 61, (prompt,), generator=g)
        rows += [torch.cat([start, torch.randint(0, 61, (n,), generator=g)]) for n in answers]
    fields = {"input_ids": rows, "response_mask": [torch.ones(len(row), dtype=torch.bool) for row in rows]}
    return SampleBatch.from_lists(fields, dict.fromkeys(fields, "token"))


def refusal(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return str(error)
    return "nothing"


def found_over_ranks(_: None) -> dict[str, Any]:
    """Tables of samples that are dealt over the ranks, and of the same samples on one."""
    import torch.distributed as dist

    from roll_batching.samples import LengthTable, find_shared_prefixes, gather_lengths

    dist.init_process_group("gloo")
    whole, rank, size = batch(), dist.get_rank(), dist.get_world_size()
    local = whole.select(range(rank, len(whole), size))
    table = find_shared_prefixes(local, gather_lengths(local))
    alone = find_shared_prefixes(whole, LengthTable.of(whole), dist.new_group([rank], use_local_synchronization=True))
    foreign = replace(table, ids=table.ids + 1, prefixes=None)
    empty = local if rank else local.select([])
    return {
        "by id": {int(i): int(table.prefixes.places[n]) for n, i in enumerate(table.ids)},
        "alone": {int(i): int(alone.prefixes.places[n]) for n, i in enumerate(alone.ids)},
        "shared": (table.prefixes.shared.tolist(), alone.prefixes.shared.tolist()),
        "foreign": refusal(lambda: find_shared_prefixes(local, foreign)),
        "no ids": refusal(lambda: find_shared_prefixes(local.without("input_ids"), table)),
        "one rank without samples": len(find_shared_prefixes(empty, gather_lengths(empty)).prefixes),
    }


def test_prefixes_are_found_over_all_ranks() -> None:
    for found in run_ranks(2, HERE + "found_over_ranks"):
        assert found["by id"] == found["alone"]
        assert found["shared"][0] == found["shared"][1] == [0, 39, 39, 39] * 3
        assert "No rank's batch holds samples" in found["foreign"]
        assert "no field input_ids" in found["no ids"]
        assert found["one rank without samples"] == 6


def choices(_: None) -> dict[str, Any]:
    from roll_batching.losses import SFTLoss
    from roll_batching.planning import PlanConstraints, plan_step
    from roll_batching.samples import find_shared_prefixes, gather_lengths
    from roll_batching.settings import BatchingConfig
    from tests.losses.steps import make_strategy

    strategy = make_strategy(cap=512)
    whole = batch()

    def shared(choice: Any, data: Any = whole, state: Any = strategy.state) -> int:
        strategy.state = replace(state, batching=replace(state.batching, share_prefixes=choice))
        return strategy.plan(strategy.gather_table(data)).report.shared_tokens

    built, spec = strategy.state, strategy.batching.train
    backend = type("Foreign", (), {"name": "mine", "decodes": False})()
    padded = replace(built.batching, train=replace(built.batching.train, mode="dynamic", algorithm=None),
                     infer=replace(built.batching.infer, mode="dynamic", algorithm=None))  # fmt: skip
    plan = plan_step(
        whole.lengths.numpy(),
        PlanConstraints(dp_size=1, max_tokens=256),
        prefixes=find_shared_prefixes(whole, gather_lengths(whole)).prefixes,
    )
    found = {
        "true": shared(True),
        "auto": shared("auto"),
        "false": shared(False),
        "auto, little": shared("auto", batch(18, (200, 190), 1)),
        "true, little": shared(True, batch(18, (200, 190), 1)),
        "auto, foreign": shared("auto", state=replace(built, attention=backend)),
        "true, foreign": refusal(lambda: shared(True, state=replace(built, attention=backend))),
        "true, core of the caller": refusal(lambda: shared(True, state=replace(built, attention=None))),
        "true, dynamic": refusal(lambda: shared(True, state=replace(built, batching=padded))),
        "unknown": refusal(lambda: shared("perhaps")),
        "number": refusal(lambda: BatchingConfig(train=spec, infer=spec, share_prefixes=2)),
    }
    strategy.state = replace(built, attention=backend)
    found["plan for a model that cannot"] = refusal(lambda: strategy.train_step(whole, plan, SFTLoss()))
    strategy.state = built
    config = strategy.chunks[0].config
    config.hidden_dropout = 0.1
    found["dropout"] = refusal(lambda: shared(True))
    config.hidden_dropout, config.moe_input_jitter_eps = 0.0, 0.01
    found["jitter"] = refusal(lambda: shared(True))
    config.moe_input_jitter_eps = None
    of_the_caller = replace(built, architecture=None)
    config.linear_attention_freq = [1, 0]
    found["delta nets of the caller"] = refusal(lambda: shared(True, state=of_the_caller))
    found["auto, delta nets of the caller"] = shared("auto", state=of_the_caller)
    config.linear_attention_freq, config.layer_kinds = None, "M*"
    found["Mamba of the caller"] = refusal(lambda: shared(True, state=of_the_caller))
    found["Mamba"] = shared(True)
    return found


def test_who_shares() -> None:
    (found,) = run_ranks(1, HERE + "choices")
    assert found["true"] == found["auto"] == 3 * 3 * 39
    assert found["false"] == found["auto, little"] == found["auto, foreign"] == 0
    assert found["true, little"] == 17
    assert "attention (mine) attends to one run of keys" in found["true, foreign"]
    assert "attention (the model's own) attends" in found["true, core of the caller"]
    assert "passes are dynamic, and packs alone share prefixes" in found["true, dynamic"]
    assert "choose auto, True or False" in found["unknown"]
    assert "share_prefixes 2" in found["number"]
    assert "samples of the plan share prefixes, but the attention (mine)" in found["plan for a model that cannot"]
    assert "hidden_dropout=0.1" in found["dropout"] and "moe_input_jitter_eps=0.01" in found["jitter"]
    for layers in ("delta nets", "Mamba"):
        assert "caller built the model, whose recurrent layers start every segment" in found[f"{layers} of the caller"]
    assert found["auto, delta nets of the caller"] == 0 and found["Mamba"] == 3 * 3 * 39


def test_a_core_with_one_run_of_keys_refuses_the_pack() -> None:
    from roll_batching.errors import LayoutError
    from roll_batching.packing.pack_layout import PackLayout
    from roll_batching.packing.params import packed_params

    layout = PackLayout(
        lengths=np.array([20, 4]), segments=np.array([20, 4]), cp_size=1, prefix_lengths=np.array([0, 18])
    )
    for attention, name in ((None, "the model's own attention"), ("transformer_engine", "transformer_engine")):
        with pytest.raises(LayoutError, match=name):
            packed_params(layout, 0, torch.device("cpu"), attention=attention)
    assert packed_params(layout, 0, torch.device("cpu"), attention="dense").positions.tolist()[-4:] == [18, 19, 20, 21]
