"""Every numeric field of the dataclasses that users construct is checked, wherever the object is made."""

from __future__ import annotations

import dataclasses
import importlib
import math
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest
import torch
from annotated_types import Ge, Gt, Le, Lt, Unit

import roll_batching
from roll_batching.checked_fields import CheckedFields
from roll_batching.errors import ConfigError, LossError, PlanError, RollBatchingError

pytestmark = pytest.mark.bad_input

NEEDED: dict[str, dict[str, Any]] = {
    "BatchingSpec": {"max_tokens": 64},
    "GenerationSettings": {"max_new_tokens": 4, "eos_token_id": 1},
    "PackTimes": {"linear": 1e9, "quadratic": 1e3, "num_layers": 2, "hidden_size": 8, "kv_size": 8},
    "ParallelLayout": {name: 0 for name in ("tp_rank", "cp_rank", "pp_rank", "dp_rank")},
    "PlanConstraints": {"dp_size": 1, "max_tokens": 64},
    "RecurrentExchange": {"layers": 1, "units": 1, "channels": 1, "map_elements": 1},
}
"""Fields without a default, and others that a valid object needs."""
MADE_BY_US = {"LossCheck", 
    "AttentionRequirements", "Completion", "DroppedSample", "Generation", "Items", "MicroBatch", "MiniBatches",
    "PackLayout", "PackedParams", "PhasePeak", "Plan", "PlanReport", "RankReport",
    "RolloutPrompt", "SimulatedStep", "StageReport", "StepCounts", "StepResult", "StepTotals",
}  # fmt: skip
"""Exported results, which only the package constructs."""
CHECKED_ELSEWHERE = {
    "DataCollatorForRollout",  # by its __init__, in TRL's words (tests/jobs/streams)
    "FieldSpec",  # its padding may be any number
    "RolloutSample",  # token by token, where a rollout function returns it (jobs/rollouts/sample_checks.py)
    "Scenario",  # a layout whose sizes the constraints check
    "Score",  # a reward that is no number counts as a failed call (reward_failure)
}


PACKAGE = Path(roll_batching.__file__).parent


def modules() -> Iterator[Any]:
    """The fronts of packages, and what declares checked classes."""
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text()
        if "CheckedFields" in text or "LossSettings" in text or (path.name == "__init__.py" and "__all__" in text):
            parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
            yield importlib.import_module(".".join(part for part in parts if part != "__init__"))


def descendants(cls: type[Any]) -> Iterator[type[Any]]:
    for child in cls.__subclasses__():
        yield child
        yield from descendants(child)


def numeric_fields(cls: type[Any]) -> dict[str, tuple[Any, ...]]:
    """By name of a field of numbers, the members of its annotation: types and metadata."""

    def members(annotation: Any) -> tuple[Any, ...]:
        inside = typing.get_args(annotation) if typing.get_origin(annotation) is not tuple else ()
        metadata = getattr(annotation, "__metadata__", ())
        return (annotation, *metadata, *(part for one in inside for part in members(one)))

    try:
        hints = typing.get_type_hints(cls, include_extras=True)
    except NameError:  # imported for type checkers alone
        return {}
    found = {field.name: members(hints[field.name]) for field in dataclasses.fields(cls)}
    return {name: kinds for name, kinds in found.items() if int in kinds or float in kinds}


def exported() -> set[type[Any]]:
    """Dataclasses with numbers that a package's front exports."""
    fronts = [module for module in modules() if hasattr(module, "__all__")]
    values = [getattr(front, name) for front in fronts for name in front.__all__]
    return {one for one in values if isinstance(one, type) and dataclasses.is_dataclass(one) and numeric_fields(one)}


EXPORTED = exported()
CHECKED = sorted(
    {cls for cls in descendants(CheckedFields) if dataclasses.is_dataclass(cls) and cls.__module__.startswith("roll_")},
    key=lambda cls: cls.__name__,
)
FIELDS = [
    (cls, name) for cls in CHECKED for name in numeric_fields(cls) if not cls.__name__.startswith("ParallelLayout")
]


def test_settings_that_users_construct_are_checked(report):
    unchecked = {cls.__name__ for cls in EXPORTED if not issubclass(cls, CheckedFields)}
    assert unchecked == MADE_BY_US | CHECKED_ELSEWHERE
    assert len(CHECKED) > 30 and len(FIELDS) > 120
    report(f"{len(CHECKED)} classes, {len(FIELDS)} numeric fields")


def wrong_values(kinds: tuple[Any, ...]) -> list[Any]:
    """Values that no numeric field with these members of its annotation takes."""
    values = [math.nan, math.inf, -math.inf, True, False, np.bool_(True), "1", "", [1], 1j]
    values += [] if type(None) in kinds else [None]
    values += [] if float in kinds else [1.5, 1.0]
    for item in kinds:
        if isinstance(item, Gt):
            values += [item.gt, item.gt - 1]
        elif isinstance(item, Ge):
            values += [item.ge - 1, math.nextafter(item.ge, -math.inf)]
        elif isinstance(item, Lt):
            values += [item.lt, item.lt + 1]
        elif isinstance(item, Le):
            values += [item.le * 2, math.nextafter(item.le, math.inf)]
    return values


@pytest.mark.parametrize(("cls", "name"), FIELDS, ids=lambda one: getattr(one, "__name__", one))
def test_a_number_that_is_none_is_refused_by_name(cls, name):
    kinds, needed = numeric_fields(cls)[name], NEEDED.get(cls.__name__, {})
    cls(**needed)
    if cls.__name__ in ("ParallelDims", "PlanConstraints") and name == "etp_size":
        kinds += (type(None),)  # the tensor-parallel size
    for value in wrong_values(kinds):
        with pytest.raises(RollBatchingError) as caught:
            cls(**needed | {name: value})
        text = str(caught.value)
        assert text.startswith(f"{cls.__name__}.{name} is {value!r}; it must be "), text


@dataclass(frozen=True, kw_only=True)
class Link(CheckedFields, error=PlanError):
    name: str = "x"
    latency: Annotated[float, Ge(0), Le(0.01), Unit("seconds")] = 1e-6
    lanes: int | Literal["auto"] | None = None
    is_up: bool = True
    kind: Literal["copper", "fibre"] = "fibre"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"latency": 5},
            "Link.latency is 5; it must be a finite number of seconds, at least 0 and at most 0.01; did you mean 5e-06 "
            "(5 microseconds)?",
        ),
        ({"lanes": 1.5}, "Link.lanes is 1.5; it must be auto, an integer or None"),
        ({"lanes": "all"}, "Link.lanes is 'all'; it must be auto, an integer or None"),
        ({"is_up": 1}, "Link.is_up is 1; it must be True or False"),
        ({"kind": "air"}, "Link.kind is 'air'; it must be one of copper, fibre"),
    ],
)
def test_an_error_names_class_field_value_and_bounds(values, message):
    with pytest.raises(PlanError) as caught:
        Link(**values)
    assert str(caught.value) == message


def test_other_numbers_become_plain_ones():
    link = Link(latency=np.float32(0), lanes=torch.tensor(3), is_up=np.bool_(False), name=3)  # a text is not checked
    assert [type(value) for value in (link.latency, link.lanes, link.is_up)] == [float, int, bool]
    assert dataclasses.replace(link, lanes="auto").lanes == "auto"


def test_a_subclass_with_types_that_cannot_be_resolved_is_checked_in_its_inherited_fields():
    @dataclass(frozen=True, kw_only=True)
    class Own(Link):
        partner: Unknown = None  # noqa: F821

    class Mixin:
        latency: Unknown  # noqa: F821

    @dataclass(frozen=True, kw_only=True)
    class Mixed(Mixin, Link):
        partner: Unknown.Part | None = None  # noqa: F821
        weight: float = 1.0

    assert Own(partner=3).partner == Mixed(partner=3).partner == 3
    with pytest.raises(PlanError, match=r"Own\.latency is nan"):
        Own(latency=math.nan)
    for name in ("latency", "weight"):
        with pytest.raises(PlanError, match=rf"Mixed\.{name} is nan"):
            Mixed(**{name: math.nan})


def test_losses_and_rates_of_the_report():
    from roll_batching.losses import DPOLoss, PolicyLoss
    from roll_batching.planning.pack_times import Cluster

    for make, values in (
        (DPOLoss, {"label_smoothing": 0.9}),
        (DPOLoss, {"beta": math.nan}),
        (PolicyLoss, {"entropy_coef": -math.inf}),
    ):
        with pytest.raises(LossError, match=next(iter(values))):
            make(**values)
    for name, value, cure in (
        ("node_latency", 25, "did you mean 2.5e-05 (25 microseconds)?"),
        ("network_latency", 0.06, "did you mean 6e-05 (0.06 milliseconds)?"),
        ("network_latency", 0.005, "did you mean 5e-06 (0.005 milliseconds)?"),
        ("layer_floor", 0.9, "did you mean 0.0009 (0.9 milliseconds)?"),
        ("layer_floor", 1000, "did you mean 0.001 (1000 microseconds)?"),
        ("matmul_rate", 590, "did you mean 5.9e+14 (590 TFLOP/s)?"),
        ("network_bandwidth", 42, "did you mean 4.2e+10 (42 GB/s)?"),
    ):
        with pytest.raises(PlanError) as caught:
            Cluster(**{name: value})
        assert str(caught.value).endswith(cure), caught.value


@pytest.mark.parametrize("seed", [math.nan, 1.5, -1, True, "1", 1 << 60])
def test_a_strategy_takes_only_seeds(seed):
    from roll_batching.strategy import MegatronInferStrategy, MegatronTrainStrategy

    for make in (MegatronInferStrategy, MegatronTrainStrategy):
        with pytest.raises(ConfigError, match=f"seed={seed!r} (must be an integer of at least 0|is above 2\\^40)"):
            make(None, seed=seed)
    assert MegatronTrainStrategy(None, seed=np.int64(3)).seed == 3
