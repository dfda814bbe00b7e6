"""`import roll_batching as rb` gives a loop's names, and docs/own-loop.md is a program from top to bottom."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import roll_batching as rb
from tests.support.ranks import run_ranks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "own-loop.md"
HEAVY = ("torch", "numpy", "numba", "megatron", "pydantic", "matplotlib")


def test_the_import_loads_nothing_heavy():
    code = f"import sys, roll_batching; print([name for name in {HEAVY} if name in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_names_are_there_for_programs_and_for_type_checkers():
    tree = ast.parse(Path(rb.__file__).read_text())
    (guarded,) = (node for node in tree.body if isinstance(node, ast.If) and not node.orelse and not _is_not(node))
    typed = {alias.name: node.module for node in guarded.body for alias in node.names}  # type: ignore[attr-defined]
    lazy = {name: f"roll_batching.{module}" for module, names in rb._MODULES.items() for name in names}
    assert typed == lazy and sorted(lazy) == sorted(rb.__all__)
    for name in rb.__all__:
        assert getattr(rb, name).__name__ == name and name in dir(rb)


def _is_not(node: ast.If) -> bool:
    return isinstance(node.test, ast.UnaryOp)


def test_an_unknown_name_names_a_near_one():
    with pytest.raises(AttributeError, match="no attribute 'plan_stp'. Did you mean 'plan_step'?"):
        rb.plan_stp  # type: ignore[attr-defined]  # noqa: B018
    assert not hasattr(rb, "completely_else")


def type_the_page(code: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(code, "loop.py", "exec"), names)
    ids = names["log_probs"].ids.tolist()
    return {"loss": names["result"].loss, "ids": ids, "same": ids == names["batch"].ids.tolist()}


@pytest.mark.layouts
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_page_is_a_program(ranks):
    code = "".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL))
    found = run_ranks(ranks, "tests.strategy.test_own_loop_page:type_the_page", code)
    assert len({rank["loss"] for rank in found}) == 1 and found[0]["loss"] < 1.5  # 1.9 is a guess among 7
    assert all(rank["same"] for rank in found)
    assert sorted(i for rank in found for i in rank["ids"]) == list(range(8 * ranks))
