"""The package's metadata and archives: what they say and what they hold; `scripts/check_release.py` installs them."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from functools import cache

import pytest
from markdown_it import MarkdownIt

import roll_batching
from tests.scripts.test_pages import PAGES, ROOT

PACKAGE = ROOT / "roll_batching"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]

DISTRIBUTIONS = {
    "PIL": "pillow",
    "fla": "fla-core",
    "flash_attn": "flash-attn-4",
    "hydra": "hydra-core",
    "math_verify": "math-verify",
    "megatron": "megatron-core",
    "yaml": "pyyaml",
}
"""Modules whose distribution has another name."""
BROUGHT_BY = {
    "annotated_types": "pydantic",
    "huggingface_hub": "transformers",
    "llvmlite": "numba",
    "pydantic_core": "pydantic",
    "triton": "torch",
}
"""Modules of distributions that a declared one requires."""
OF_THE_USER = {"emerging_optimizers", "gem", "nemo_rl", "roll", "slime", "verl"}
"""A host, a package of GitHub alone, or one whose pins clash with ours: imported where the user has it."""


def name_of(requirement: str) -> str:
    return re.match(r"[\w-]+", requirement)[0].lower()


def declared() -> set[str]:
    """The distributions that the base install or an extra for users names."""
    for_users = [needs for extra, needs in EXTRAS.items() if extra not in ("dev", "docs")]
    return {name_of(need) for needs in (PROJECT["project"]["dependencies"], *for_users) for need in needs}


@cache
def foreign_imports() -> dict[str, str]:
    """Top-level modules that the package imports, at a module's top or inside functions, and a file that does."""
    found = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            for name in names:
                found.setdefault(name.partition(".")[0], str(file.relative_to(ROOT)))
    return {name: file for name, file in found.items() if name not in {*sys.stdlib_module_names, "roll_batching"}}


def undeclared(imports: dict[str, str]) -> dict[str, str]:
    """Of these imports, those that no dependency and no extra provides."""
    provided = {name: BROUGHT_BY.get(name, DISTRIBUTIONS.get(name, name)) for name in imports}
    return {name: imports[name] for name in imports if provided[name] not in declared() and name not in OF_THE_USER}


def test_every_import_belongs_to_a_dependency_or_an_extra():
    assert undeclared(foreign_imports()) == {}


def test_an_undeclared_import_is_found():
    assert undeclared({"scipy": "somewhere.py"}) == {"scipy": "somewhere.py"}


def test_a_module_that_another_brings_is_required_by_it():
    """Of those installed here; triton comes with CUDA builds of torch alone."""
    for module, owner in BROUGHT_BY.items():
        try:
            required = {name_of(need) for need in importlib.metadata.requires(owner) or ()}
        except importlib.metadata.PackageNotFoundError:
            continue
        if module != "triton":
            assert module.replace("_", "-") in {name.replace("_", "-") for name in required}, (module, owner)


def test_lower_bounds_alone_are_set():
    """An upper bound or a fixed version needs a known failure, and then a line here; so does a pre-release."""
    needs = [*PROJECT["project"]["dependencies"], *(need for extra in EXTRAS.values() for need in extra)]
    bounds = {need: re.sub(r"^[\w-]+(\[[\w,-]+\])?", "", need.partition(";")[0]) for need in needs}
    without = {"types-PyYAML", "flash-attn-4>=4.0.0b36"} | {need for need in needs if need.startswith("roll-batching[")}
    assert {need for need in needs if not re.fullmatch(r">=[\d.]+", bounds[need])} == without


def test_extras_of_compiled_packages_stay_out_of_others():
    """`dev` and users' extras install on machines without a GPU; TransformerEngine changes Megatron's code paths."""
    named = {extra: named_extras(" ".join(needs)) for extra, needs in EXTRAS.items()}
    assert named["gpu"] == {"flash-attn", "hf", "megatron"}
    assert [extra for extra, others in named.items() if others & {"flash-attn", "gpu", "te"}] == ["gpu"]


def test_every_file_of_the_package_reaches_the_wheel():
    listed = subprocess.run(["git", "ls-files", "roll_batching"], cwd=ROOT, check=True, capture_output=True, text=True)
    data = {name for name in listed.stdout.splitlines() if not name.endswith(".py")}
    patterns = PROJECT["tool"]["setuptools"]["package-data"]
    covered = {str(file.relative_to(ROOT)) for package, globs in patterns.items() for glob in globs
               for file in ROOT.joinpath(*package.split(".")).glob(glob)}  # fmt: skip
    assert data == covered
    assert "roll_batching/py.typed" in covered
    folders = {file.parent for file in PACKAGE.rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_the_metadata_say_what_the_project_is():
    project = PROJECT["project"]
    assert (project["name"], project["license"], project["readme"]) == ("roll-batching", "Apache-2.0", "README.md")
    assert "Apache License" in (ROOT / "LICENSE").read_text()[:400]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"]["attr"] == "roll_batching.__version__"
    assert re.fullmatch(r"\d+\.\d+\.\d+", roll_batching.__version__)
    assert f"## {roll_batching.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    versions = {text.removeprefix("Programming Language :: Python :: ") for text in project["classifiers"]
                if re.search(r"Python :: 3\.\d+$", text)}  # fmt: skip
    tested = set(re.findall(r"Python (3\.\d+) with megatron-core", (ROOT / "docs" / "evidence.md").read_text()))
    assert versions == tested == {"3.11", "3.12"}
    assert project["requires-python"] == f">={min(versions)}"


def test_the_readme_renders_with_all_its_code_in_blocks():
    tokens = MarkdownIt().parse((ROOT / "README.md").read_text())
    blocks = "".join(token.content for token in tokens if token.type == "code_block")
    assert "pip install --editable '.[megatron]' --constraint constraints.txt" in blocks
    assert [token.tag for token in tokens if token.type == "heading_open"][0] == "h1"


def named_extras(text: str) -> set[str]:
    """The extras that `roll-batching[...]`, `.[...]` and wheels' paths name."""
    return {
        extra for names in re.findall(r"(?:roll-batching|\.whl|'\.)\[([\w,-]+)\]", text) for extra in names.split(",")
    }


def test_the_page_lists_all_extras_and_pages_name_no_other():
    page = (ROOT / "docs" / "installing.md").read_text()
    assert set(re.findall(r"^\| `([\w-]+)` \|", page, re.MULTILINE)) == set(EXTRAS)
    sources = [*PAGES, *PACKAGE.rglob("*.py"), *(ROOT / "scripts").iterdir()]
    assert set().union(*(named_extras(file.read_text()) for file in sources if file.is_file())) <= set(EXTRAS)


def test_the_page_names_the_archives_of_this_version():
    archives = re.findall(
        r"roll_batching-[\d.]+(?:-py3-none-any\.whl|\.tar\.gz)", (ROOT / "docs/installing.md").read_text()
    )
    version = roll_batching.__version__
    assert set(archives) == {f"roll_batching-{version}-py3-none-any.whl", f"roll_batching-{version}.tar.gz"}


def test_the_check_knows_how_each_extra_is_used():
    from scripts.check_release import USE_OF_EXTRAS, extras_of

    assert set(USE_OF_EXTRAS) == set(EXTRAS) == set(extras_of("all"))
    with pytest.raises(SystemExit, match="no extra nothing"):
        extras_of("hf,nothing")


def test_a_file_that_is_missing_or_does_not_belong_is_named():
    from scripts.check_release import CheckFailed, compare

    compare("archive", {"a", "b"}, {"a", "b"})
    with pytest.raises(CheckFailed, match=r"lacks \['py.typed'\]"):
        compare("archive", {"a"}, {"a", "py.typed"})
    with pytest.raises(CheckFailed, match=r"do not belong in it: \['tests/test_a.py'\]"):
        compare("archive", {"a", "tests/test_a.py"}, {"a"})


@pytest.mark.slow
def test_both_archives_install_and_work_outside_the_checkout():
    kept = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, ROOT / "scripts" / "check_release.py"]
    done = subprocess.run(command, env=kept, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line[:2] for line in done.stdout.splitlines()] == ["ok"] * 5, done.stdout
