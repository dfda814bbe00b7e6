"""Heads of multi-token prediction: gradients of every mode and layout, and what training changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.layouts import Layout
from tests.support.ranks import meet, part, run_ranks

HERE = "tests.strategy.test_mtp:"
CAP, LIMIT = 64, 1e-5
MODES = ("padded", "dynamic", "packed")
EXPERTS = {"num_experts": 4, "router_topk": 2, "ffn_hidden_size": 24}


def strategy_of(layout: Layout, mode: str = "packed", **changes: Any) -> Any:
    """A training strategy with two heads and the weights that names stand for; `changes` are of the layout."""
    from roll_batching.strategy import MegatronTrainStrategy
    from tests.support.models import ARCHITECTURE, fill, worker_config

    shape = {
        **ARCHITECTURE,
        "num_layers": layout.layers or 4,
        "tie_word_embeddings": layout.tied,
        **({"moe": EXPERTS} if layout.moe else {}),
    }
    megatron = {**layout.megatron(), "mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.3, **changes}
    strategy = MegatronTrainStrategy(worker_config(mode, CAP, architecture=shape, megatron=megatron))
    strategy.initialize()
    fill(strategy.chunks, 61, strategy.layout.tp_rank, strategy.layout.tp_size)
    return strategy


def step(strategy: Any, whole: Any) -> Any:
    """One step on this rank's share of a batch."""
    from roll_batching.losses import SFTLoss
    from roll_batching.samples import distribute, gather_lengths

    place = strategy.layout
    local = whole.select(torch.arange(place.dp_rank, len(whole), place.dp_size))
    plan = strategy.plan(gather_lengths(local))
    return strategy.train_step(distribute(local, plan), plan, SFTLoss())


def gradients(cases: list[tuple[Layout, str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Gradients, losses and metrics of a step by layout and mode."""
    from tests.support.models import random_batch, whole_gradients

    found = []
    for number, (layout, mode, changes) in enumerate(cases):
        meet(number)
        strategy = strategy_of(layout, mode, **changes)
        result = step(strategy, random_batch(40, 9, 40))
        one = whole_gradients(strategy.chunks, 61, strategy.layout.tp_rank, layout.distopt)
        found.append({"gradients": one, "loss": result.loss, "metrics": result.metrics})
        del strategy
        part()
    return found


def compare(found: dict[str, Any], expected: dict[str, Any]) -> tuple[float, str]:
    """Worst relative difference of gradients, losses and metrics, and its name."""
    from tests.support.models import worst_difference

    gap, name = worst_difference(found["gradients"], expected["gradients"])
    assert found["metrics"].keys() == expected["metrics"].keys()
    numbers = {key: abs(value - expected["metrics"][key]) for key, value in found["metrics"].items()}
    numbers["loss"] = abs(found["loss"] - expected["loss"])
    numbers["spread"] = found["gradients"]["spread"]
    return max([(gap, name), *((value, key) for key, value in numbers.items())])


def check(cases: list[tuple[Layout, str, dict[str, Any]]], report: Any) -> None:
    """Every case has the gradients of one rank that pads, with the same architecture."""
    kinds = {(case[0].moe, case[0].layers, case[0].tied, str(case[2])): case for case in cases}
    plain = [
        (Layout(moe=moe, layers=layers, tied=tied), "padded", kind[2]) for (moe, layers, tied, _), kind in kinds.items()
    ]
    expected = dict(zip(kinds, run_ranks(1, f"{HERE}gradients", plain, timeout=300)[0], strict=True))
    for ranks in sorted({case[0].ranks for case in cases}):
        same = [case for case in cases if case[0].ranks == ranks]
        outcomes = run_ranks(ranks, f"{HERE}gradients", same, timeout=600)[0]
        for (layout, mode, changes), found in zip(same, outcomes, strict=True):
            gap, name = compare(found, expected[layout.moe, layout.layers, layout.tied, str(changes)])
            report(f"{layout!s:40} {mode:8} {changes or ''} worst difference {gap:.1e} ({name})")
            assert gap < LIMIT, (layout, mode, name)


def test_modes_and_layouts_have_the_gradients_of_one_rank(report: Any) -> None:
    cases = [
        *((Layout(), mode, {}) for mode in ("dynamic", "packed")),
        (Layout(per_token=False), "packed", {}),
        (Layout(tp=2, sp=True), "packed", {}),
        (Layout(pp=2), "packed", {}),
        (Layout(cp=2), "packed", {}),
    ]
    check(cases, report)


@pytest.mark.slow
def test_experts_stages_and_combinations(report: Any) -> None:
    overlapped = {"overlap_grad_reduce": True}
    cases = [
        (Layout(tp=2), "padded", {}),
        (Layout(recompute=True), "dynamic", {}),
        (Layout(tied=True, cp=2), "packed", {}),
        (Layout(dp=2, distopt=True), "packed", overlapped),
        (Layout(pp=2, vpp=2), "packed", overlapped),
        (Layout(pp=2, vpp=2, recompute=True), "packed", overlapped | {"mtp_detach_heads": True}),
        (Layout(pp=2, vpp=2, layers=4, pattern="Ett|t|t|L"), "packed", {}),
        (Layout(moe=True, dp=2, ep=2), "packed", {}),
        (Layout(moe=True, tp=2, sp=True), "packed", {}),
        (Layout(moe=True, pp=2), "dynamic", {}),
        (Layout(tp=2, sp=True, pp=2, recompute=True), "packed", {}),
        (Layout(pp=2, cp=2), "packed", {}),
        (Layout(moe=True, tp=2, sp=True, dp=2, ep=2, distopt=True), "packed", {}),
    ]
    check(cases, report)


def controls(steps: int) -> dict[str, Any]:
    """Losses of heads over steps on one batch, what moves where they are frozen, and the model's first gradients."""
    from roll_batching.modeling.head import gpt_of
    from tests.support.models import random_batch, whole_gradients

    found: dict[str, Any] = {}
    kinds = {
        "joint": {},
        "detached": {"mtp_detach_heads": True},
        "frozen": {"mtp_loss_scaling_factor": 0.0},
        "none": {"mtp_num_layers": 0, "mtp_loss_scaling_factor": 0.1},  # the default: heads alone read it
    }
    for number, (kind, changes) in enumerate(kinds.items()):
        meet(number)
        strategy = strategy_of(Layout(pp=2), **changes)
        place = strategy.layout
        heads = {
            name: (parameter, parameter.detach().clone())
            for chunk in strategy.chunks
            for name, parameter in gpt_of(chunk).named_parameters()
            if name.startswith("mtp.")
        }
        losses, batch = [], random_batch(41, 9, 40)
        first: dict[str, Any] = {}
        for _ in range(steps):
            result = step(strategy, batch)
            losses.append(result.metrics.get("mtp_1_loss"))
            first = first or whole_gradients(strategy.chunks, 61, place.tp_rank, False)
        found[kind] = {
            "losses": losses,
            "heads": len(heads),
            "moved": sum(not torch.equal(parameter, before) for parameter, before in heads.values()),
            "gradients": {name: value for name, value in first.items() if not name.startswith("mtp.")},
        }
        del strategy, heads
        part()
    return found


def test_heads_learn_and_leave_the_model_alone_where_asked(report: Any) -> None:
    """On the last stage. Detached and frozen heads change no gradient of the model; frozen ones do not move."""
    *_, last = run_ranks(2, f"{HERE}controls", 6, timeout=300)
    for kind in ("joint", "detached", "frozen"):
        report(f"{kind}: loss of the first head {last[kind]['losses'][0]:.3f} to {last[kind]['losses'][-1]:.3f}")
    for kind in ("joint", "detached"):
        assert last[kind]["losses"][-1] < last[kind]["losses"][0] - 0.15
        assert last[kind]["moved"] == last[kind]["heads"] == 20
    assert last["frozen"]["moved"] == 0 and last["frozen"]["heads"] == 20
    assert last["frozen"]["losses"][-1] > last["frozen"]["losses"][0] - 0.05
    model = last["none"]["gradients"]
    for kind in ("detached", "frozen"):
        assert last[kind]["gradients"].keys() == model.keys()
        assert all(torch.equal(last[kind]["gradients"][name], model[name]) for name in model.keys() - {"spread"})
    joint = last["joint"]["gradients"]
    assert not torch.equal(
        joint["decoder.layers.0.mlp.linear_fc1.weight"], model["decoder.layers.0.mlp.linear_fc1.weight"]
    )


def moved(payload: str) -> dict[str, Any]:
    """A checkpoint of one layout in another and in a model without heads, and weights copied to such models."""
    from roll_batching.modeling.head import gpt_of
    from roll_batching.strategy import MegatronInferStrategy
    from tests.support.models import random_batch

    path, losses = Path(payload) / "saved", []
    for number, layout in enumerate((Layout(pp=2), Layout(tp=2, sp=True))):
        meet(number)
        strategy = strategy_of(layout)
        if number:
            strategy.load(path)
        else:
            step(strategy, random_batch(41, 9, 40))
            strategy.save(path)
        losses.append(step(strategy, random_batch(42, 9, 40)))
        if number:
            copies = []
            for other in (layout, Layout(pp=2)):
                config = strategy.config
                args = config.strategy_args.strategy_config.model_copy(
                    update={
                        "tensor_model_parallel_size": other.tp,
                        "sequence_parallel": other.sp,
                        "pipeline_model_parallel_size": other.pp,
                    }
                )
                role = config.model_copy(
                    update={"strategy_args": config.strategy_args.model_copy(update={"strategy_config": args})}
                )
                plain = MegatronInferStrategy(role)
                plain.initialize(weights=False)
                plain.copy_weights_from(strategy)
                plain.load(path)
                names = [name for chunk in plain.chunks for name, _ in gpt_of(chunk).named_parameters()]
                copies.append(any(name.startswith("mtp.") for name in names))
        del strategy
        if not number:
            part()
    return {"losses": [(one.loss, one.metrics["mtp_2_loss"], one.grad_norm) for one in losses], "heads": copies}


def test_checkpoints_go_to_other_layouts_and_models_without_heads(tmp_path: Path, report: Any) -> None:
    found = run_ranks(2, f"{HERE}moved", str(tmp_path), timeout=300)[0]
    before, after = found["losses"]
    report(f"(loss, loss of the second head, gradient norm) after a step: {before}, in the other layout {after}")
    assert after == pytest.approx(before, abs=LIMIT)
    assert found["heads"] == [False, False]
