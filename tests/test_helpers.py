"""Test helpers leave the library and the package as users have them.

A helper that repairs what it needs hides the fault from every test that calls it. So no module that tests share
replaces an attribute of Megatron, torch, TransformerEngine or this package, except those listed here with a reason. A
test that injects a fault or records calls does so in its own file.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIBRARIES = {"megatron", "torch", "transformer_engine", "roll_batching"}
LOOKED_UP = "a module that is looked up"
REPLACING = {
    "benchmarks/bench_recurrent.py": "makes exchanges last as long as on slow links",
    "benchmarks/simulation/computing.py": "times passes, and counts the keys that slices keep",
    "benchmarks/simulation/sleeping.py": "records the times of sends and receives",
    "tests/campaigns/conversion_proof/slime_figures.py": "the host's functions run uncompiled",
    "tests/hosts/megatron_lm_trainer.py": "the host's training needs CUDA",
    "tests/hosts/own_tests.py": "counts calls of the package inside a host's own tests",
    "tests/hosts/roll_actor.py": "the host's actor needs CUDA; Megatron's attention is replaced by a mask of its own",
    "tests/hosts/verl_trainer.py": "the host's trainer opens a process group that exists already",
    "tests/jobs/engines/receiving.py": "names the ranks of a process group that spans two jobs",
    "tests/jobs/rl/jobs.py": "records the steps of a job",
    "tests/jobs/streams/test_streamed_job.py": "records the steps of its jobs",
    "tests/tools/doctor/faults.py": "injects faults",
    "tests/tools/rehearsal/jobs.py": "routes tokens evenly, as a rehearsal assumes",
    "tests/tools/rehearsal/paths.py": "injects a fault",
    "tests/strategy/test_optimizer_step.py": "notes which tensors are alive when an optimizer is built",
    "tests/strategy/test_pipeline.py": "counts transfers and synchronisations",
    "tests/te/engine.py": "builds TransformerEngine's layers without a GPU",
    "tests/te/plain_kernels.py": "computes TransformerEngine's layers without its kernels",
}
"""Shared modules that replace attributes, and why. None of tests/support, and no conftest.py."""


def replaced_attributes(source: str) -> list[str]:
    """Statements of `source`, outside of tests, that set or delete attributes of the libraries' modules and classes."""
    tree = ast.parse(source)
    owners = _library_names(tree)
    tests = [x for x in ast.walk(tree) if isinstance(x, ast.FunctionDef) and x.name.startswith("test_")]
    of_tests = {node for test in tests for node in ast.walk(test)}
    shared = [node for node in ast.walk(tree) if node not in of_tests]
    return [ast.unparse(node) for node in shared if any(_root(x) in owners for x in _written(node))]


def _library_names(tree: ast.Module) -> set[str]:
    """Names bound to objects of the libraries: imported, or assigned or iterated from such names."""
    names: set[str] = {"mock", "monkeypatch", LOOKED_UP}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {a.asname or a.name.split(".")[0] for a in node.names if a.name.split(".")[0] in LIBRARIES}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in LIBRARIES:
            names |= {a.asname or a.name for a in node.names}
    for _ in range(2):  # an alias of an alias
        for node in ast.walk(tree):
            match node:
                case ast.Assign(targets=[*targets], value=value) if _root(value) in names:
                    names |= {target.id for target in targets if isinstance(target, ast.Name)}
                case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                    names |= {name} if _root(value) in names else set()
                case ast.For(target=target, iter=ast.Tuple() | ast.List() as values):
                    if any(_root(x) in names for x in _flat(values)):
                        names |= {x.id for x in ast.walk(target) if isinstance(x, ast.Name)}
    return names


def _written(node: ast.AST) -> Iterator[ast.expr]:
    """The objects whose attributes a statement or call sets or deletes."""
    match node:
        case ast.Assign(targets=targets) | ast.Delete(targets=targets):
            for target in targets:
                yield from (x.value for x in _flat(target) if isinstance(x, ast.Attribute | ast.Subscript))
        case ast.AugAssign(target=ast.Attribute(value=value)) | ast.AnnAssign(target=ast.Attribute(value=value)):
            yield value
        case ast.Call(func=ast.Name(id="setattr" | "delattr"), args=[owner, *_]):
            yield owner
        case ast.Call(func=ast.Attribute(value=ast.Attribute(attr="__dict__") | ast.Call() as owner, attr="update")):
            yield owner
        case ast.Call(func=ast.Attribute(attr="setattr" | "delattr" | "setitem" | "object" | "patch") as function):
            yield function


def _flat(node: ast.expr) -> Iterator[ast.expr]:
    if isinstance(node, ast.Tuple | ast.List):
        for item in node.elts:
            yield from _flat(item)
    else:
        yield node


def _root(node: ast.expr) -> str:
    """The first name of `a.b.c` or `vars(a.b)`, or of a module that is looked up; "" for others.

    The result of another call is an object of its own, and `torch.backends` holds settings.
    """
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value):
            return "" if ast.unparse(node).startswith("torch.backends.") else _root(value)
        case ast.Call(func=ast.Name(id="vars"), args=[owner]):
            return _root(owner)
        case (
            ast.Call(func=ast.Attribute(attr="import_module") | ast.Name(id="import_module"), args=[name, *_])
            | ast.Subscript(value=ast.Attribute(attr="modules"), slice=name)
        ):
            is_other = isinstance(name, ast.Constant) and str(name.value).split(".")[0] not in LIBRARIES
            return "" if is_other else LOOKED_UP
    return ""


def shared_test_modules(paths: list[Path]) -> set[Path]:
    """Modules `test_*.py` that other modules import, or name in a text, as `run_ranks` takes it."""
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in paths}
    shared = set()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.ImportFrom(module=str() as module, names=aliases):
                    names = [module, *(f"{module}.{alias.name}" for alias in aliases)]
                case ast.Import(names=aliases):
                    names = [alias.name for alias in aliases]
                case ast.Constant(value=str() as text) if text.startswith("tests."):
                    names = [text.partition(":")[0]]
                case _:
                    continue
            shared |= {modules[name] for name in names if name in modules and modules[name] != path}
    return {path for path in shared if path.name.startswith("test_")}


def test_no_helper_replaces_what_users_have() -> None:
    paths = [path for room in ("tests", "benchmarks") for path in (ROOT / room).rglob("*.py")]
    helpers = {path for path in paths if not path.name.startswith("test_")} | shared_test_modules(paths)
    found = {
        str(path.relative_to(ROOT)): statements
        for path in helpers
        if (statements := replaced_attributes(path.read_text()))
    }
    unlisted = {path: statements for path, statements in found.items() if path not in REPLACING}
    assert not unlisted, "the cure belongs in roll_batching/megatron_patches, the fault into the test's own file"
    assert not REPLACING.keys() - found.keys(), "no longer replaces anything"
    assert not [path for path in REPLACING if path.startswith("tests/support/") or path.endswith("conftest.py")]


def test_test_modules_that_others_use_are_helpers() -> None:
    names = {str(path.relative_to(ROOT)) for path in shared_test_modules(list((ROOT / "tests").rglob("*.py")))}
    assert "tests/strategy/test_checkpoint.py" in names and "tests/test_helpers.py" not in names


@pytest.mark.parametrize(
    "source",
    [
        "from megatron.core.transformer.moe import moe_utils\nmoe_utils.gemm = None",
        "def f():\n    from megatron.core.transformer.moe import moe_utils\n    m: Any = moe_utils\n    m.gemm = None",
        "import torch\nsetattr(torch.cuda, 'is_available', f)",
        "import torch.distributed as dist\ndel dist.barrier",
        "from roll_batching.strategy import infer\nfor a, b in ((infer, 'x'),):\n    setattr(a, b, None)",
        "from unittest import mock\nmock.patch.object(x, 'y')",
        "def fixture(monkeypatch):\n    monkeypatch.setattr('torch.cuda.is_available', f)",
        "from roll_batching.losses import SFTLoss\nSFTLoss.needs, x = 1, 2",
        "import importlib\nimportlib.import_module('megatron.core.utils').f = None",
        "import importlib\nm = importlib.import_module(name)\nm.f = None",
        "import sys\nsys.modules['torch.cuda'].is_available = f",
        "from megatron.core import utils\nvars(utils)['f'] = None",
        "from megatron.core import utils\nutils.__dict__.update(f=None)",
        "from megatron.core import utils\nvars(utils).update(f=None)",
    ],
)
def test_replacements_are_found(source: str) -> None:
    assert replaced_attributes(source)


@pytest.mark.parametrize(
    "source",
    [
        "from roll_batching.losses import SFTLoss\nloss = SFTLoss()\nloss.weight = 1",
        "import torch\ntorch.backends.cuda.matmul.allow_tf32 = False",
        "class A:\n    def __init__(self):\n        self.x = 1",
        "import importlib\nimportlib.import_module('verl.trainer').f = None",
        "values = make()\nvalues.update(x=1)",
    ],
)
def test_attributes_of_own_objects_are_none(source: str) -> None:
    assert not replaced_attributes(source)
