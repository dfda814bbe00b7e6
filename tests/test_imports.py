"""The structure that docs/architecture.md describes: which room may import which, no circles, no file too long."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "roll_batching"

PLUGIN: tuple[tuple[str, ...], ...] = (
    ("errors",),
    ("checked_fields", "files", "known_warnings", "lifetime", "secret_names"),
    ("registry",),
    ("planning", "megatron_patches"),
    ("distributed", "huggingface"),
    ("settings", "samples"),
    ("packing",),
    ("modeling",),
    ("losses",),
    ("strategy",),
    ("integrations", "loss_check"),
)
"""The plugin's rooms from the bottom up: a room imports rooms of lower floors only."""

JOBS: tuple[tuple[str, ...], ...] = (
    ("jobs.observe", "jobs.seeds", "jobs.processes"),
    ("jobs.config", "jobs.texts"),
    ("jobs.streams", "jobs.rewards"),
    ("jobs.text_sets",),
    ("jobs.inputs", "jobs.engines"),
    ("jobs.objectives",),
    ("jobs.steps",),
    ("jobs.rollouts",),
    ("jobs.roles",),
    ("jobs.run",),
    ("jobs.supervised", "jobs.rl"),
    ("jobs.job",),
    ("jobs.launch",),
    ("jobs.driver",),
)
"""The rooms of the jobs, above the plugin, likewise."""

TOOLS = ("tools.conversion", "tools.doctor", "tools.rehearsal", "tools.simulation", "tools.report")
"""Rooms above the jobs that only commands import."""

FLOORS = (*PLUGIN, *JOBS, TOOLS, ("commands",), ("cli",), ("__main__",))

LONGEST_FILE = 400
LONGEST_FUNCTION_IN_PLANNING = 60


def room_of(module: str) -> str:
    """`planning` of roll_batching.planning.plan, and `jobs.rl` of roll_batching.jobs.rl.grpo."""
    _, *parts = module.split(".")
    return ".".join(parts[: 2 if parts[:1] in (["jobs"], ["tools"]) else 1])


@cache
def modules() -> dict[str, Path]:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imports() -> dict[str, frozenset[str]]:
    """The modules of this package that each module imports: at its top, inside functions, or for types alone."""
    return {name: frozenset(_imported(name, ast.parse(path.read_text()))) for name, path in modules().items()}


def _imported(name: str, tree: ast.AST) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} imports relatively: write the whole path"
            for alias in node.names:
                inside = f"{node.module}.{alias.name}"
                found.add(inside if inside in modules() else str(node.module))
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return {target for target in found if target in modules() and target != name}


def test_rooms_import_lower_floors_only():
    floor = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
    assert {room_of(name) for name in modules()} - {"", "jobs", "tools", *floor} == set(), "a room without a floor"
    upward = [
        f"{name} imports {target}"
        for name, targets in imports().items()
        for target in targets
        if room_of(name) in floor and room_of(target) in floor and room_of(name) != room_of(target)
        and floor[room_of(target)] >= floor[room_of(name)]
    ]  # fmt: skip
    assert upward == []


def test_no_module_imports_itself_over_others():
    """Inside rooms either, and neither through lazy imports nor through those for types."""
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> list[str]:
        if name in trail:
            return [" -> ".join((*trail[trail.index(name) :], name))]
        if name in done:
            return []
        circles = [circle for target in sorted(imports()[name]) for circle in visit(target, (*trail, name))]
        done.add(name)
        return circles

    assert [circle for name in sorted(modules()) for circle in visit(name, ())] == []


def test_a_packages_front_imports_its_modules_and_they_never_its_front():
    fronts = {name for name, path in modules().items() if path.name == "__init__.py" and name != "roll_batching"}
    back = [
        f"{name} imports {target}"
        for name, targets in imports().items()
        for target in targets & fronts
        if name.startswith(f"{target}.")
    ]
    assert back == []


def test_the_list_of_patches_names_every_module():
    room = "roll_batching.megatron_patches"
    table = ast.get_docstring(ast.parse(modules()[room].read_text())) or ""
    names = {name.rsplit(".", 1)[1] for name in modules() if name.startswith(f"{room}.")}
    assert names == {row.split("`")[1] for row in table.splitlines() if row.startswith("- `")}


PACKERS = "roll_batching.planning.packers"


def test_packers_know_neither_counts_nor_ranks():
    allowed = {f"roll_batching.planning.{name}" for name in ("arrays", "compiled")} | {"roll_batching.errors"}
    for name, targets in imports().items():
        if name.startswith(PACKERS):
            assert {t for t in targets if not t.startswith(PACKERS)} <= allowed, name


def test_one_driver_calls_the_algorithms():
    """Nobody but the driver and the forming of bins reaches for a packer, nobody but the driver assembles."""
    users = {name for name, targets in imports().items() if any(t.startswith(f"{PACKERS}.") for t in targets)}
    outside = {name for name in users if not name.startswith(PACKERS)}
    planning = "roll_batching.planning"
    assert outside == {
        planning,  # pack_bins, for callers
        f"{planning}.dynamic_cp.nested",  # first fit, as a tool
        f"{planning}.placement",
        f"{planning}.load_balance.pools",  # first fit, as a tool
        f"{planning}.partition",
    }
    assembling = {name for name, targets in imports().items() if f"{planning}.assemble" in targets}
    assert assembling == {f"{planning}.plan", f"{planning}.planner"}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_can_be_read_in_one_go(path):
    text = path.read_text()
    assert len(text.splitlines()) <= LONGEST_FILE
    if "planning" not in path.relative_to(PACKAGE).parts:
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno is not None and node.end_lineno - node.lineno < LONGEST_FUNCTION_IN_PLANNING, (
                node.name
            )


MOST_FILES, MOST_LINES = 100, 18_840
LINES = {
    "": 915,
    "commands": 1_780,
    "distributed": 800,
    "huggingface": 2_830,
    "integrations": 3_015,
    "jobs": 765,
    "jobs.config": 7_040,
    "jobs.driver": 700,
    "jobs.engines": 2_680,
    "jobs.launch": 1_650,
    "jobs.objectives": 1_100,
    "jobs.observe": 1_120,  # runs of MLflow and Trackio
    "jobs.processes": 450,
    "jobs.rewards": 2_950,
    "jobs.rl": 985,
    "jobs.roles": 1_320,
    "jobs.rollouts": 3_215,
    "jobs.run": 1_400,
    "jobs.steps": 750,
    "jobs.streams": 1_600,
    "jobs.supervised": 200,
    "jobs.texts": 3_060,  # what a review found: masks, pieces and folders that were read wrongly
    "loss_check": 850,
    "losses": 3_880,
    "megatron_patches": 450,
    "modeling": 6_170,
    "packing": 1_750,
    "planning": 10_640,
    "samples": 2_320,
    "settings": 3_960,
    "strategy": 7_725,
    "tools": 50,
    "tools.conversion": 6_690,
    "tools.doctor": 1_200,
    "tools.rehearsal": 4_060,
    "tools.report": 1_750,
    "tools.simulation": 760,
}
"""Most lines of each room; "" are files outside of rooms. A commit that raises a budget says why."""

LOADED = """
import importlib, json, sys
importlib.import_module("{module}")
ours = {{name: module.__file__ for name, module in sys.modules.items() if name.split(".")[0] == "roll_batching"}}
print(json.dumps({{name: len(open(file).readlines()) for name, file in ours.items() if file}}))
"""


def loaded(module: str) -> dict[str, int]:
    """Lines of each module of ours that `import module` reads."""
    command = [sys.executable, "-W", "ignore", "-c", LOADED.format(module=module)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_a_room_stays_within_its_lines():
    lines: dict[str, int] = {}
    for path in PACKAGE.rglob("*.py"):
        folders = path.relative_to(PACKAGE).parent.parts
        room = ".".join(folders[: 2 if folders[:1] in (("jobs",), ("tools",)) else 1])
        lines[room] = lines.get(room, 0) + len(path.read_text().splitlines())
    assert lines.keys() == LINES.keys()
    assert {room: count for room, count in lines.items() if count > LINES[room]} == {}


def test_the_plugin_is_light_and_knows_no_job(report):
    lines = loaded("roll_batching.strategy")
    report(f"import roll_batching.strategy reads {len(lines)} files and {sum(lines.values()):,} lines")
    assert [name for name in lines if room_of(name).startswith("jobs")] == []
    assert len(lines) <= MOST_FILES and sum(lines.values()) <= MOST_LINES


def test_planning_is_light(report):
    lines = loaded("roll_batching.planning")
    report(f"import roll_batching.planning reads {len(lines)} files and {sum(lines.values()):,} lines")
    assert {room_of(name) for name in lines} <= {"", "checked_fields", "errors", "registry", "planning"}
    assert len(lines) <= 36 and sum(lines.values()) <= 5_660
