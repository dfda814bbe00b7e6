"""Checkpoints of Megatron's distributed optimizer: to the bit in its layout, and in any other."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import torch

from tests.strategy.test_checkpoint import FIRST_LOSS, KINDS, LATER_LOSS
from tests.support.layouts import Layout
from tests.support.ranks import run_ranks

HERE = "tests.strategy.test_sharded_checkpoint:"
CASES = "tests.strategy.test_checkpoint:"
OVERLAPPED = {"overlap_grad_reduce": True, "overlap_param_gather": True}


def case_of(kind: str, layout: Layout, **megatron: Any) -> dict[str, Any]:
    """What `strategy_of` builds there."""
    return {**KINDS[kind], "layout": layout.megatron() | megatron}


def _name(layout: Layout) -> str:
    return str(layout).rsplit(" ", 1)[0]


@pytest.mark.parametrize(
    ("kind", "layout", "megatron"),
    [
        ("bf16", Layout(dp=2, distopt=True), OVERLAPPED),
        ("tied", Layout(pp=2, dp=2, distopt=True), {}),  # the shared embedding has a bucket of its own
        pytest.param("dense", Layout(dp=2, distopt=True), {}, marks=pytest.mark.slow),
        pytest.param("tied", Layout(tp=2, dp=2, distopt=True), {}, marks=pytest.mark.slow),
        pytest.param("dense", Layout(tp=2, sp=True, dp=2, distopt=True), OVERLAPPED, marks=pytest.mark.slow),
        pytest.param("bf16", Layout(pp=2, vpp=2, dp=2, distopt=True), {}, marks=pytest.mark.slow),
        pytest.param("bf16", Layout(cp=2, dp=2, distopt=True), {}, marks=pytest.mark.slow),
        pytest.param("dense", Layout(dp=3, distopt=True), {}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_goes_on_to_the_bit(tmp_path, kind, layout, megatron):
    """Loaded by other processes, weights, moments and the next steps are those of the run that was not interrupted."""
    case = case_of(kind, layout, **megatron) | {"path": str(tmp_path / "state")}
    before = run_ranks(layout.ranks, CASES + "save_and_go_on", case)
    after = run_ranks(layout.ranks, CASES + "load_and_go_on", case)
    for (tensors, expected), (found, again) in zip(before, after, strict=True):
        assert tensors.keys() == found.keys() and len(tensors) > 20
        assert not [name for name in tensors if not torch.equal(tensors[name], found[name])]
        assert again == expected


D4, D2 = Layout(dp=4, distopt=True), Layout(dp=2, distopt=True)
JOURNEYS: list[tuple[str, Layout, list[Layout]]] = [
    ("bf16", D2, [Layout(tp=2, distopt=True), Layout(pp=2)]),
    ("dense", D4, [D2, Layout(tp=2, dp=2, distopt=True), Layout()]),
    ("dense", D2, [D4, Layout(cp=2, distopt=True)]),
    ("dense", Layout(pp=4, distopt=True), [Layout(tp=2, pp=2, distopt=True), Layout(dp=3, distopt=True)]),
    (
        "tied",
        Layout(pp=2, dp=2, distopt=True),
        [D4, Layout(tp=2, pp=2, distopt=True), Layout(pp=2, vpp=2, distopt=True)],
    ),
    ("bf16", D4, [Layout(tp=2, sp=True, dp=2, distopt=True), Layout(pp=2, vpp=2, dp=2, distopt=True), Layout(dp=2)]),
    ("dense", D2, [Layout(tp=2, sp=True, pp=2, distopt=True), Layout(pp=2, vpp=2, cp=2, distopt=True)]),
    ("experts", D2, [Layout(dp=2, ep=2, distopt=True), Layout(tp=2, sp=True, distopt=True), Layout()]),
]


@pytest.mark.parametrize(
    ("kind", "home", "stations"),
    [pytest.param(*journey, marks=pytest.mark.slow if number else ()) for number, journey in enumerate(JOURNEYS)],
    ids=[f"{kind} {_name(home)}" for kind, home, _ in JOURNEYS],
)
def test_loaded_in_another_layout(tmp_path, report, kind, home, stations):
    """Saved again by each layout on the way and loaded at home, it is what it was, to the bit: no layout lost any."""
    case = case_of(kind, home)
    before = run_ranks(home.ranks, CASES + "save_and_go_on", case | {"path": f"{tmp_path}/{kind}-0"})
    expected = before[0][1]
    for number, layout in enumerate(stations):
        (found, *_) = run_ranks(layout.ranks, CASES + "hop", (str(tmp_path), [(kind, number, asdict(layout))]))
        steps = found[kind, str(layout)]
        gaps = [abs(there[0] - here[0]) / abs(here[0]) for there, here in zip(steps, expected, strict=True)]
        report(f"{kind:8} {_name(home)} in {_name(layout)}: next loss {gaps[0]:.1e}, the one after {gaps[1]:.1e}")
        assert [step[2] for step in steps] == [step[2] for step in expected], "the schedule goes on"
        if kind == "bf16":
            assert max(gaps) < 1e-2
        else:
            assert gaps[0] < FIRST_LOSS and gaps[1] < LATER_LOSS
    after = run_ranks(home.ranks, CASES + "load_and_go_on", case | {"path": f"{tmp_path}/{kind}-{len(stations)}"})
    for (tensors, _), (found, again) in zip(before, after, strict=True):
        assert tensors.keys() == found.keys()
        assert not [name for name in tensors if not torch.equal(tensors[name], found[name])]
        assert again == expected


def said_while_saving(case: dict[str, Any]) -> list[str]:
    """What Megatron logs while a state is saved, beside what nobody can act on."""
    import logging

    from roll_batching.known_warnings import hide_known_warnings
    from tests.strategy.test_checkpoint import strategy_of

    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    strategy = strategy_of(case)
    hide_known_warnings()
    logging.getLogger("megatron").addHandler(handler)
    strategy.save(case["path"])
    return said


def test_ranks_that_put_nothing_together_save_without_a_warning(tmp_path):
    layout = Layout(dp=3, distopt=True)
    case = case_of("dense", layout) | {"path": str(tmp_path / "state")}
    assert run_ranks(layout.ranks, HERE + "said_while_saving", case) == [[], [], []]


# ---- what is refused


UNSAVED = ("use_megatron_fsdp", "use_precision_aware_optimizer", "optimizer_cpu_offload")


def refusals(folder: str) -> dict[str, str]:
    """What saving and loading end with, by the key of the caller's optimizer that is set."""
    from roll_batching.errors import CheckpointError
    from tests.strategy.test_checkpoint import strategy_of

    strategy = strategy_of(case_of("dense", Layout(distopt=True)))
    strategy.save(f"{folder}/whole")
    (part,) = strategy.optimizer.chained_optimizers
    said: dict[str, str] = {}
    for key in UNSAVED:
        config = part.ddp_config if key == "use_megatron_fsdp" else part.config
        setattr(config, key, True)
        for act, path in ((strategy.save, "never"), (strategy.load, "whole")):
            with pytest.raises(CheckpointError) as caught:
                act(f"{folder}/{path}")
            said[f"{path}: {key}"] = str(caught.value)
        setattr(config, key, False)
    plain = strategy_of(case_of("dense", Layout()))
    plain.optimizer.chained_optimizers[0].config.optimizer_cpu_offload = True
    with pytest.raises(CheckpointError) as caught:
        plain.save(f"{folder}/never")
    return said | {"plain: optimizer_cpu_offload": str(caught.value)}


@pytest.mark.bad_input
def test_state_that_is_not_saved_is_refused_by_name(tmp_path, report):
    (said,) = run_ranks(1, HERE + "refusals", str(tmp_path))
    assert len(said) == 2 * len(UNSAVED) + 1
    for name, words in said.items():
        assert f"is not saved with {name.split()[1]}" in words
        report(words)
    assert [place.name for place in tmp_path.iterdir()] == ["whole"]
