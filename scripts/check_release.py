"""Builds the wheel and the source archive, and checks, installs and uses them in fresh environments.

    python scripts/check_release.py                  build, contents, twine, and both archives installed and used
    python scripts/check_release.py --floors         also: base dependencies at their oldest versions (Python 3.11)
    python scripts/check_release.py --extras all     also: every extra, downloaded into an environment of its own
    python scripts/check_release.py --extras hf,ray  also: these
    python scripts/check_release.py --dist dist      leaves the archives in that folder

Tracked files are built as they are in the working tree. The base install is without torch. The extra `megatron` takes
torch and megatron-core from the current interpreter, if it has them, and trains outside the checkout. pip is called
without an index, so that your pip settings decide where packages come from. Exit status 0: everything holds.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IN_THE_SOURCE_ARCHIVE = ("configs/", "docs/", "examples/", "roll_batching/")
FILES_IN_THE_SOURCE_ARCHIVE = {
    *("CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "MANIFEST.in", "README.md", "constraints.txt", "pyproject.toml"),
    *("scripts/_env.sh", "scripts/demo.sh", "scripts/te_environment.sh"),
}
MADE_BY_SETUPTOOLS = re.compile(r"PKG-INFO|setup\.cfg|roll_batching\.egg-info/.*")

USE_THE_BASE = """
import importlib.util
from roll_batching.planning import PlanConstraints, plan_step
assert importlib.util.find_spec("torch") is None, "torch came with the base install"
plan = plan_step([900, 40, 500, 30, 80, 700], PlanConstraints(dp_size=2, max_tokens=1024))
assert sorted(i for rank in plan.micro_batches for pack in rank for i in pack.samples) == list(range(6))
"""
CHECK_REQUIREMENTS = """
import importlib.metadata as metadata, sys
from packaging.requirements import Requirement
for text in metadata.requires("roll-batching"):
    need = Requirement(text)
    if need.marker is None or need.marker.evaluate({"extra": sys.argv[1]}):
        have = metadata.version(need.name)
        assert need.specifier.contains(have, prereleases=True), f"{need} asked, {have} is here"
"""
USE_OF_EXTRAS = {
    "convert": """
import hydra, omegaconf, roll_batching.tools.conversion
""",
    "dev": """
import datasets, hypothesis, jsonschema, mypy, pytest, torchdata, transformers, xdist, zensical
""",
    "docs": """
import mkdocstrings_handlers.python, ruff, zensical
""",
    "engines": """
import asyncio
from roll_batching.jobs.processes.requests import open_session
async def use():
    async with open_session(1.0):
        pass
asyncio.run(use())
""",
    "environments": """
from roll_batching.jobs.rollouts.environments import FrozenLake
assert FrozenLake().reset(seed=1, options={})[0].startswith("P")
""",
    "fla": """
from roll_batching.modeling.delta_kernels import kernel
assert kernel() is not None
""",
    "flash-attn": """
import inspect
from flash_attn.cute import flash_attn_varlen_func
assert {"cu_seqlens_q", "window_size", "learnable_sink"} <= set(inspect.signature(flash_attn_varlen_func).parameters)
""",
    "gpu": """
import transformers, roll_batching.strategy
from roll_batching.modeling.attention.packages import installed_function
installed_function()
""",
    "hf": """
import jinja2, safetensors, tokenizers, transformers, roll_batching.jobs.texts.tokenizers
""",
    "ifeval": """
from roll_batching.jobs.rewards.contract import Completion
from roll_batching.jobs.rewards.instructions import ifeval
line = {"answer": '{"func_name": "validate_response_language", "language": "en"}'}
answer = Completion(prompt="", response="The cat sat on the mat.", finished=True, tokens=6, record=line)
assert ifeval(answer).reward == 1
""",
    "math": """
from roll_batching.jobs.rewards.contract import Completion
from roll_batching.jobs.rewards.mathematics import math_verify
answer = Completion(prompt="", response="$0.5$", finished=True, tokens=1, record={"answer": "1/2"})
assert math_verify(answer).reward == 1
""",
    "megatron": """
import psutil, tensorboard, torch, megatron.core, roll_batching.strategy
""",
    "datasets": """
from pathlib import Path
from roll_batching.jobs.texts.records import iterate_records
from roll_batching.jobs.texts.faults import Faults
Path("data").mkdir()
Path("data/train.jsonl").write_text('{"prompt": "a"}')
assert [record.texts for record in iterate_records("hf://./data?split=train", ("prompt",), Faults())] == [("a",)]
""",
    "parquet": """
from pathlib import Path
import pyarrow, pyarrow.parquet
from roll_batching.planning.lengths_io import read_lengths
pyarrow.parquet.write_table(pyarrow.table({"length": [3, 5]}), "lengths.parquet")
assert list(read_lengths(Path("lengths.parquet"))) == [3, 5]
""",
    "mlflow": """
import alembic
import sqlalchemy
from roll_batching.jobs.observe.trackers import tracker_of
mlflow = tracker_of("mlflow")
mlflow.set_tracking_uri("sqlite:///mlflow.db")
assert mlflow.MlflowClient().search_experiments()
""",
    "plot": """
import subprocess
lengths = "tokens\\n" + "90\\n40\\n" * 8
open("lengths.csv", "w").write(lengths)
subprocess.run(["roll-batching", "plan", "lengths.csv", "--plot", "plan.png"], check=True)
assert open("plan.png", "rb").read(4) == b"\\x89PNG"
""",
    "ray": """
import ray, roll_batching.jobs.launch.on_ray.cluster
""",
    "report": """
import plotly
""",
    "swanlab": """
from roll_batching.jobs.observe.trackers import tracker_of
assert tracker_of("swanlab").init
""",
    "te": """
import importlib.metadata, importlib.util
from pathlib import Path
(folder,) = importlib.util.find_spec("transformer_engine").submodule_search_locations
assert list(Path(folder).rglob("libtransformer_engine.so")), "its library is not in the wheels"
assert importlib.metadata.version("transformer-engine") == importlib.metadata.version("transformer-engine-cu13")
""",
    "trackio": """
from roll_batching.jobs.observe.trackers import tracker_of
assert tracker_of("trackio").init
""",
    "vision": """
import PIL.Image, transformers, roll_batching.jobs.texts.image_tokenizer
""",
    "wandb": """
from roll_batching.jobs.observe.trackers import tracker_of
assert tracker_of("wandb").init
""",
}
"""What shows that an extra serves: its packages, and our code that imports them."""
FEW_STEPS = ("max_steps=1", "warmup.training_args.max_steps=1", "eval_samples=0", "save_steps=0")


class CheckFailed(Exception):
    """A check that does not hold."""


def require(holds: bool, message: str) -> None:
    if not holds:
        raise CheckFailed(message)


@dataclass(frozen=True)
class Environment:
    """A virtual environment, and an empty folder outside the checkout where its commands run."""

    folder: Path
    elsewhere: Path

    @classmethod
    def make(cls, folder: Path, *, reuse: Sequence[Path] = ()) -> Environment:
        """A new one, whose packages come before those of the folders `reuse`."""
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        elsewhere = folder.with_name(f"{folder.name}-elsewhere")
        elsewhere.mkdir()
        made = cls(folder, elsewhere)
        # Folders on a .pth file's lines are searched last, and their own .pth files, such as that of an editable
        # install, are not read.
        (made.site_packages / "reused.pth").write_text("".join(f"{path}\n" for path in reuse))
        return made

    @property
    def site_packages(self) -> Path:
        (found,) = (self.folder / "lib").glob("python*/site-packages")
        return found

    def run(self, *command: object, status: int = 0, cwd: Path | None = None, **variables: str) -> str:
        """Standard output and error of a command of this environment; raises CheckFailed at another exit status."""
        kept = {name: text for name, text in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        path = os.pathsep.join((str(self.folder / "bin"), kept.get("PATH", os.defpath)))
        words = [str(word) for word in command]
        done = subprocess.run(
            [str(self.folder / "bin" / words[0]), *words[1:]],
            cwd=cwd or self.elsewhere,
            env={"OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg", **kept, "PATH": path, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        require(
            done.returncode == status, f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout[-4000:].strip()}"
        )
        return done.stdout

    def install(self, *arguments: object) -> None:
        """pip install."""
        self.run("python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments)

    def place_of_package(self) -> Path:
        """The folder from which `import roll_batching` loads it."""
        code = "import roll_batching; print(roll_batching.__path__[0])"
        return Path(self.run("python", "-c", code).splitlines()[-1])


def tracked_files() -> list[str]:
    """Files that git tracks and that are there, relative to the root."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def copy_tracked(target: Path) -> Path:
    """A copy of the tracked files: what git ignores, such as a stale list of sources, reaches no archive."""
    for name in tracked_files():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target / name)
    return target


def build(source: Path, dist: Path, tools: Environment) -> tuple[Path, Path]:
    """The wheel and the source archive of `source`; the wheel is built from the archive."""
    tools.install("build", "twine", "--constraint", ROOT / "constraints.txt")
    tools.run("python", "-m", "build", "--outdir", dist, source)
    (wheel,), (archive,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    tools.run("python", "-m", "twine", "check", "--strict", wheel, archive)
    return wheel, archive


def check_contents(wheel: Path, archive: Path) -> None:
    """Both archives have every file that belongs in them and no other."""
    tracked = set(tracked_files())
    package = {name for name in tracked if name.startswith("roll_batching/")}
    require("roll_batching/py.typed" in package, "roll_batching/py.typed is not tracked")
    with zipfile.ZipFile(wheel) as opened:
        in_wheel = {name for name in opened.namelist() if ".dist-info/" not in name}
    compare(wheel.name, in_wheel, package)
    with tarfile.open(archive) as opened_archive:
        members = [member.name.partition("/")[2] for member in opened_archive.getmembers() if member.isfile()]
    in_archive = {name for name in members if not MADE_BY_SETUPTOOLS.fullmatch(name)}
    wanted = {name for name in tracked if name.startswith(IN_THE_SOURCE_ARCHIVE)}
    compare(archive.name, in_archive, wanted | FILES_IN_THE_SOURCE_ARCHIVE)


def compare(archive: str, found: set[str], wanted: set[str]) -> None:
    require(not wanted - found, f"{archive} lacks {sorted(wanted - found)}")
    require(not found - wanted, f"{archive} has files that do not belong in it: {sorted(found - wanted)}")


def use_base(environment: Environment, source: Path) -> None:
    """Plans in Python and at the command line, and what training says without torch."""
    environment.run("python", "-c", USE_THE_BASE)
    shutil.copy(source / "examples" / "lengths.csv", environment.elsewhere)
    environment.run("roll-batching", "plan", "lengths.csv", "--dp", "4", "--compare")
    said = environment.run("roll-batching", "plan", "lengths.csv", "--plot", "plan.png", status=2)
    require("pip install 'roll-batching[plot]'" in said, f"a picture without matplotlib said:\n{said}")
    job = source / "configs" / "sft_demo.yaml"
    said = environment.run("roll-batching", "sft", "--config", job, status=1)
    require("pip install 'roll-batching[megatron]'" in said, f"training without torch said:\n{said}")


def train(environment: Environment, source: Path) -> None:
    """Packed steps of an own Megatron loop and of a job on two ranks, in a folder that has examples only."""
    shutil.copytree(source / "examples", environment.elsewhere / "examples")
    environment.run("python", "-c", CHECK_REQUIREMENTS, "megatron")
    environment.run("python", "examples/your_megatron_loop.py")
    environment.run("python", "examples/own_task/make_data.py")
    environment.run("roll-batching", "train", "--config", "examples/own_task/config.yaml", *FEW_STEPS)
    rows = (environment.elsewhere / "runs" / "own_task" / "metrics.jsonl").read_text().splitlines()
    require(len(rows) >= 2, "the job of one warm-up step and one RL step wrote no metrics of them")


def own_place(environment: Environment) -> None:
    place = environment.place_of_package()
    require(place.is_relative_to(environment.folder), f"roll_batching was imported from {place}")


def check_floors(source: Path, environment: Environment) -> None:
    """Planning, configurations and the command line with the oldest versions of what they need."""
    project = tomllib.loads((source / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needs = [*project["dependencies"], *extras["convert"], *extras["parquet"]]
    oldest = [need.replace(">=", "==") for need in needs]
    pinned = dict(re.findall(r"^([\w-]+)==([^\s;]+)", (source / "constraints.txt").read_text(), re.MULTILINE))
    environment.install(*oldest, *(f"{name}=={pinned[name]}" for name in ("hypothesis", "jsonschema", "pytest")))
    print("      " + ", ".join(oldest))
    environment.run(
        *("python", "-m", "pytest", "-q", "-x", "-m", "not slow", "tests/planning", "tests/jobs/config"),
        cwd=source,
        NUMBA_CACHE_DIR=str(environment.elsewhere / "numba"),
    )


def check_extra(name: str, wheel: Path, environment: Environment) -> None:
    """An extra installs from the wheel under constraints.txt, and our code imports what it brings."""
    environment.install(f"{wheel}[{name}]", "--constraint", ROOT / "constraints.txt")
    own_place(environment)
    environment.run("python", "-c", USE_OF_EXTRAS[name])


def extras_of(text: str) -> list[str]:
    """The extras that `--extras` names. Raises SystemExit for an unknown one."""
    known = list(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    names = known if text == "all" else [name for name in text.split(",") if name]
    if unknown := sorted(set(names) - set(known)):
        raise SystemExit(f"--extras: there is no extra {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    return names


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--floors", action="store_true", help="test the oldest versions of the base dependencies")
    parser.add_argument("--extras", default="", help="install these extras, comma-separated, or all")
    parser.add_argument("--dist", type=Path, help="leave the archives in this folder")
    return parser.parse_args(arguments)


def check(options: argparse.Namespace, work: Path, step: Callable[[str, Callable[[], object]], object]) -> None:
    """All checks in sequence, in the empty folder `work`."""
    extras = extras_of(options.extras)
    source = copy_tracked(work / "source")
    archives: list[Path] = []

    def build_both() -> None:
        archives.extend(build(source, work / "dist", Environment.make(work / "tools")))

    step("wheel and source archive are built and pass twine check --strict", build_both)
    wheel, archive = archives
    step("both contain what belongs in them and nothing else", lambda: check_contents(wheel, archive))
    if options.dist is not None:
        options.dist.mkdir(parents=True, exist_ok=True)
        for file in archives:
            shutil.copy2(file, options.dist)

    base = Environment.make(work / "base")

    def install_wheel() -> None:
        base.install(wheel, "--constraint", ROOT / "constraints.txt")
        own_place(base)
        use_base(base, source)

    step("base install of the wheel: plans, and says what training needs", install_wheel)

    def install_archive() -> None:
        second = Environment.make(work / "second", reuse=[base.site_packages])
        second.install("--no-deps", "--ignore-installed", archive)
        own_place(second)
        use_base(second, source)

    step("base install of the source archive, likewise", install_archive)

    def install_megatron() -> None:
        (package,) = importlib.util.find_spec("torch").submodule_search_locations  # type: ignore[union-attr]
        third = Environment.make(work / "third", reuse=[Path(package).parent])
        third.install("--no-deps", "--ignore-installed", wheel)
        own_place(third)
        train(third, source)

    if importlib.util.find_spec("torch") and importlib.util.find_spec("megatron"):
        step("megatron: packed steps of an own loop and of a job on two ranks", install_megatron)
    else:
        print("left out: the extra megatron, as this interpreter has no torch and megatron-core to reuse")
    if options.floors:
        step("oldest base dependencies", lambda: check_floors(source, Environment.make(work / "floors")))
    for name in extras:
        step(f"extra {name}", lambda name=name: check_extra(name, wheel, Environment.make(work / f"extra-{name}")))


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_arguments(arguments)

    def step(title: str, run: Callable[[], object]) -> None:
        start = time.monotonic()
        try:
            run()
        except CheckFailed as failure:
            raise SystemExit(f"FAIL  {title}\n{failure}") from None
        print(f"ok    {title} ({time.monotonic() - start:.0f} s)", flush=True)

    with tempfile.TemporaryDirectory(prefix="roll-batching-release-") as folder:
        check(options, Path(folder), step)


if __name__ == "__main__":
    main()
