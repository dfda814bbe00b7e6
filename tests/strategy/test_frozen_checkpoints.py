"""Checkpoints of models of which some layers, or parts of layers, are frozen: resumed to the bit, and in other layouts.

Megatron stacks equal layers under one key, of which the frozen ones have no optimizer state.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.layouts import Layout
from tests.support.ranks import run_ranks

HERE = "tests.strategy.test_frozen_checkpoints:"
MOE = {"num_experts": 4, "router_topk": 2, "ffn_hidden_size": 12}
PREFIXES = {
    "first": ["embedding", "decoder.layers.0"],
    "all but last": ["embedding", *(f"decoder.layers.{n}" for n in range(3)), "output_layer"],
    "stage": [f"decoder.layers.{n}" for n in (0, 1)] + ["embedding"],
    "middle": ["decoder.layers.1", "decoder.layers.2"],
    "part of a layer": ["decoder.layers.2.mlp"],
}


def strategy_of(case: dict[str, Any], seed: int = 1) -> Any:
    """An initialised strategy that trains a part of its model."""
    from roll_batching.strategy import MegatronTrainStrategy
    from tests.strategy.test_checkpoint import ARCHITECTURE
    from tests.support.models import worker_config

    config = worker_config(
        "packed",
        64,
        architecture={**ARCHITECTURE, **case.get("architecture", {})},
        megatron=case["layout"],
        training={"learning_rate": 1e-2, "lr_scheduler_type": "linear", "max_steps": 20},
        dtype=case.get("dtype", "fp32"),
    )
    if prefixes := case.get("frozen"):
        model_args = config.model_args.model_copy(update={"freeze_module_prefix": tuple(prefixes)})
        config = type(config).model_validate(config.model_dump() | {"model_args": model_args.model_dump()})
    strategy = MegatronTrainStrategy(config, seed=seed)
    strategy.initialize()
    return strategy


def save_and_go_on(case: dict[str, Any]) -> Any:
    from tests.strategy.test_checkpoint import bits, steps

    strategy = strategy_of(case)
    steps(strategy, 0, 2)
    strategy.save(case["path"])
    return bits(strategy), steps(strategy, 2, 4)


def load_and_go_on(case: dict[str, Any]) -> Any:
    from tests.strategy.test_checkpoint import bits, steps

    strategy = strategy_of(case, seed=99)
    strategy.load(case["path"])
    restored = bits(strategy)
    if "again" in case:
        strategy.save(case["again"])
    return restored, steps(strategy, 2, 4)


def _case(path: Any, frozen: str, layout: Layout, **more: Any) -> dict[str, Any]:
    return {"path": str(path / "state"), "frozen": PREFIXES.get(frozen), "layout": layout.megatron(), **more}


def _require_equal(before: list[Any], after: list[Any]) -> None:
    for (saved, expected), (restored, found) in zip(before, after, strict=True):
        assert saved.keys() == restored.keys()
        assert [name for name in saved if not torch.equal(saved[name], restored[name])] == []
        assert str(found) == str(expected), "the next steps are the same to the bit"


SAME = [
    pytest.param("first", Layout(dp=2), {}, id="data parallel"),
    pytest.param("first", Layout(dp=2, distopt=True), {}, id="sharded"),
    pytest.param("all but last", Layout(pp=2, distopt=True), {"dtype": "bf16"}, id="last layer, bf16"),
    pytest.param("stage", Layout(pp=2), {}, id="a whole stage"),
    pytest.param("middle", Layout(pp=2, vpp=2), {"dtype": "bf16"}, id="virtual stages"),
    pytest.param("part of a layer", Layout(tp=2, sp=True), {"architecture": {"moe": MOE}}, id="experts of a layer"),
    pytest.param("first", Layout(dp=2, ep=2, distopt=True), {"architecture": {"moe": MOE}}, id="expert parallel"),
    pytest.param("first", Layout(dp=2, distopt=True), {"architecture": {"tie_word_embeddings": True}}, id="tied"),
]


@pytest.mark.parametrize(("frozen", "layout", "more"), SAME)
def test_a_partly_frozen_model_resumes_to_the_bit(
    tmp_path: Any, frozen: str, layout: Layout, more: dict[str, Any]
) -> None:
    case = _case(tmp_path, frozen, layout, **more)
    before = run_ranks(layout.ranks, HERE + "save_and_go_on", case, timeout=100)
    _require_equal(before, run_ranks(layout.ranks, HERE + "load_and_go_on", case, timeout=100))


@pytest.mark.parametrize("frozen", ["first", "stage"])
def test_it_resumes_in_other_layouts_and_comes_back(tmp_path: Any, frozen: str) -> None:
    """One rank, then others with and without the distributed optimizer, then one rank with the bits of the first."""
    first = _case(tmp_path, frozen, Layout())
    before = run_ranks(1, HERE + "save_and_go_on", first)
    path = first["path"]
    for number, layout in enumerate([Layout(pp=2, distopt=True), Layout(dp=2, distopt=True), Layout(tp=2)]):
        case = _case(tmp_path, frozen, layout) | {"path": path, "again": str(tmp_path / str(number))}
        (_, found), *_ = run_ranks(2, HERE + "load_and_go_on", case, timeout=100)
        path = case["again"]
        for there, here in zip(before[0][1], found, strict=True):
            assert abs(there[0] - here[0]) < 1e-4 * abs(there[0])
    _require_equal(before, run_ranks(1, HERE + "load_and_go_on", first | {"path": path}))


# ---- other ways to freeze


def freeze_and_save(payload: tuple[str, str]) -> Any:
    """The caller's own freezing of a part that no prefix names, by `from_parts`."""
    from roll_batching.strategy import MegatronTrainStrategy
    from tests.strategy.test_checkpoint import bits, steps
    from tests.strategy.test_from_parts import _batching, _start
    from tests.support.own_model import build

    path, names = payload
    found = []
    for act in ("save", "load"):
        _start(pp=2)
        options = {"use_distributed_optimizer": True}
        parts = build("packed", layers=4, optimizer=options, trained=names)
        strategy = MegatronTrainStrategy.from_parts(*parts, _batching("packed"))
        if act == "save":
            steps(strategy, 0, 2)
        getattr(strategy, act)(path)
        found.append((bits(strategy), steps(strategy, 2, 4)))
    return found


@pytest.mark.parametrize("names", [r"layernorm", r"layers\.0\..*layernorm|output_layer", r"layers\.1\.mlp|final"])
def test_norms_alone_or_single_modules_of_a_callers_model(tmp_path: Any, names: str) -> None:
    for before, after in run_ranks(2, HERE + "freeze_and_save", (str(tmp_path / "state"), names), timeout=100):
        _require_equal([before], [after])


def half_precision(path: str) -> Any:
    """Steps, loss scale and bits of a model in fp16 whose first stage is frozen; then those of one that loads them."""
    import torch.distributed as dist

    from roll_batching.strategy import MegatronTrainStrategy
    from tests.strategy.test_checkpoint import bits, steps
    from tests.strategy.test_from_parts import _batching, _start
    from tests.support.own_model import build

    half = {"fp16": True, "params_dtype": torch.float16}
    found = []
    for act in ("save", "load"):
        _start(pp=2)
        scale = {"initial_loss_scale": 2.0**20, "min_loss_scale": 1.0, "loss_scale_window": 2, "hysteresis": 1}
        parts = build(
            "packed", frozen=dist.get_rank() == 0, optimizer=half | scale, pipeline_dtype=torch.float16, **half
        )
        parts[0][0].config.grad_scale_func = parts[1].scale_loss
        strategy = MegatronTrainStrategy.from_parts(*parts, _batching("packed"))
        if act == "save":
            steps(strategy, 0, 4)
        getattr(strategy, act)(path)
        scaler = getattr(strategy.optimizer.chained_optimizers[0], "grad_scaler", None)
        scales = {} if scaler is None else {name: str(value) for name, value in scaler.state_dict().items()}
        found.append((bits(strategy), scales, steps(strategy, 4, 6)))
    return found


def test_a_loss_scale_is_saved_that_rank_0_does_not_have(tmp_path: Any) -> None:
    (_, last) = run_ranks(2, HERE + "half_precision", str(tmp_path / "state"), timeout=100)
    (saved, scales, expected), (restored, scales_after, found) = last
    assert scales == scales_after and scales["scale"] != "tensor([1048576.])"
    _require_equal([(saved, expected)], [(restored, found)])


def other_freezing(path: str) -> str:
    from roll_batching.errors import RankError

    layout = Layout(dp=2).megatron()
    strategy_of({"layout": layout, "frozen": PREFIXES["first"]}).save(path)
    other = strategy_of({"layout": layout, "frozen": PREFIXES["middle"]}, seed=99)
    with pytest.raises(RankError) as caught:
        other.load(path)
    other.load(path, optimizer=False)
    return str(caught.value)


@pytest.mark.bad_input
def test_another_choice_of_frozen_layers_is_named(tmp_path: Any, report: Callable[[str], None]) -> None:
    first, second = run_ranks(2, HERE + "other_freezing", str(tmp_path / "state"), timeout=100)
    report(first)
    assert first == second and "has the state of another optimizer, or of other trained parameters" in first
    assert re.search(r"optimizer\.state\.exp_avg\.\S+\.1 .* is not in the model here|is missing there", first)
    assert "optimizer=False" in first
