"""Settings of what a configuration names, checked by the types that it declares itself."""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from roll_batching.errors import ConfigError
from roll_batching.jobs.config.arguments import Arguments


@dataclass(frozen=True)
class Fields:
    scale: float = 1.0
    mode: Literal["a", "b"] = "a"
    copy: tuple[int, ...] = field(default_factory=tuple)  # a model of pydantic's has a method of this name
    start: InitVar[int] = 0


class Keywords:
    def __init__(self, rate: float, *rest: int, flag: bool = False, where: Path | None = None, _own: int = 1) -> None:
        pass


class Anything:
    def __init__(self, first: int, **options: Any) -> None:
        pass


def function(untyped, typed: int = 1):
    return untyped, typed


@pytest.mark.parametrize(
    ("made", "given", "expected"),
    [
        (Fields, {}, {}),
        (Fields, {"scale": 2, "copy": [1, 2], "start": 3}, {"scale": 2.0, "copy": (1, 2), "start": 3}),
        (Keywords, {"rate": 1, "where": "a/b", "_own": 2}, {"rate": 1.0, "where": Path("a/b"), "_own": 2}),
        (Anything, {"first": 1, "second": [None]}, {"first": 1, "second": [None]}),
        (function, {"untyped": {"a": 1.5}}, {"untyped": {"a": 1.5}}),
    ],
)
def test_what_is_given_gets_its_types(made, given, expected):
    found, problems = Arguments.of("it", made).read(given, ("args",))
    assert (found, problems) == (expected, [])
    assert {name: type(value) for name, value in found.items()} == {n: type(v) for n, v in expected.items()}


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("made", "given", "path", "words"),
    [
        (Fields, {"scal": 1}, "args.scal", "unknown setting; did you mean 'scale'? the settings of it are scale, mode"),
        (Fields, {"mode": "c"}, "args.mode", "should be 'a' or 'b', got 'c'"),
        (Fields, {"scale": True}, "args.scale", "got True"),
        (Fields, {"scale": "1"}, "args.scale", "got '1'"),
        (Fields, {"scale": float("nan")}, "args.scale", "finite"),
        (Fields, {"start": 1.5}, "args.start", "valid integer, got 1.5"),
        (Keywords, {}, "args.rate", "is missing: it needs it"),
        (Keywords, {"rate": 1.0, "flag": 1}, "args.flag", "valid boolean, got 1"),
        (Keywords, {"rate": 1.0, "rest": [1]}, "args.rest", "unknown setting"),
        (type("Bare", (), {}), {"a": 1}, "args.a", "unknown setting; it has no settings"),
    ],
)
def test_what_is_wrong_is_told_by_its_key(made, given, path, words, report):
    _, (problem,) = Arguments.of("it", made).read(given, ("args",))
    assert ".".join(map(str, problem.path)) == path and words in problem.message, str(problem)
    report(str(problem))


def test_fields_of_a_base_are_resolved_where_it_stands():
    """Its annotations are text that means something in its own module alone."""
    pytest.importorskip("torch")
    from roll_batching.losses import PolicyLoss

    @dataclass(frozen=True, kw_only=True)
    class Own(PolicyLoss):
        extra: float = 0.0

    found, problems = Arguments.of("it", Own).read({"kl_estimator": "k2", "extra": 1}, ())
    assert (found, problems) == ({"kl_estimator": "k2", "extra": 1.0}, [])
    _, (problem,) = Arguments.of("it", Own).read({"kl_estimator": "k4"}, ())
    assert "'k1', 'k2', 'k3' or 'abs'" in problem.message


@pytest.mark.bad_input
def test_types_that_do_not_exist(report):
    class Unresolved:
        def __init__(self, a: Nowhere) -> None:  # noqa: F821
            pass

    with pytest.raises(ConfigError, match="types of the settings of it cannot be read: name 'Nowhere'") as caught:
        Arguments.of("it", Unresolved)
    report(str(caught.value))
