"""The commands of README.md and the pages, run as they are written: in a clean clone, in the environment they name."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.scripts.test_pages import PAGES, ROOT, command_lines

README = ROOT / "README.md"
INLINE = re.compile(r"`((?:\./|python |roll-batching |pytest |pip |torchrun |ray )[^`]+)`")
SHELL = ("HOME", "LANG", "TERM", "TMPDIR", "USER", "PIP_", "PYENV_", "http_proxy", "https_proxy", "no_proxy")
"""Beginnings of the environment variables that a reader's shell has."""

NAMES_ONLY = re.compile(r"roll-batching [\w-]+|ray [\w ]+")
"""Commands that a sentence speaks of, without arguments."""

TESTS = ("./scripts/test.sh", "./scripts/slow_suite.sh", "PYTHON=python3.12 ./scripts/test.sh", "pytest ")
"""These run tests, of which this is one: they collect theirs here."""

NOT_HERE = {
    "torchrun --log-dir": "needs torchrun's other arguments, which follow the machine",
    "ray start --address HEAD": "needs a second machine",
    "ray start --head": "leaves a Ray behind",
    "ray get-auth-token": "writes a token into the home directory",
    "ray job submit": "needs a Ray with a dashboard",
    "roll-batching train --config job.yaml --launcher ray --address": "needs a Ray that runs",
    "python -m sglang.launch_server": "needs SGLang and a GPU",
    "roll-batching report RUN OTHER": "needs a second run",
    "./scripts/gpu_checks.sh": "needs a GPU; the default tests rehearse its checks",
    "./scripts/gym_environment.sh": "needs Python 3.13",
    "python -m pytest --noconftest test_algorithms.py": "needs a checkout of NeMo-RL",
}
"""Commands that cannot run on one machine without a GPU and without the code of others, and why."""

PEERS = re.compile(r"CHECKOUT|--verl|--slime|--nemo-rl|--roll ")
"""Options that name checkouts of peers."""

LONG = {
    "python scripts/abuse.py",
    "python scripts/kill_campaign.py --check",
    "./scripts/check_demo.sh",
    "python scripts/check_async_demo.py",
    "python benchmarks/bench_shared_prefixes.py --device cpu --check",
    "python benchmarks/bench_prefixes_behind.py --device cpu --check",
    "python benchmarks/bench_simulation.py --check",
}
"""Commands of ten minutes and more, some with time limits for a quiet machine: run with `--deep` alone."""

ROLL_FILE = ROOT / "tests" / "jobs" / "config" / "data" / "roll_sequence_packing.yaml"
VERL_SCRIPT = """
N=${N:-4}
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=$N \\
    actor_rollout_ref.model.path=data/hf_model/tiny-qwen3 actor_rollout_ref.rollout.name=vllm
"""
SLIME_SCRIPT = """
ARGS=(--n-samples-per-prompt 4 --rollout-batch-size 4 --num-rollout 2)
python3 train.py --hf-checkpoint data/hf_model/tiny-qwen3 --colocate "${ARGS[@]}"
"""
SMALLER = {
    '"MODEL"': '"data/hf_model/tiny-qwen3"',
    "sequence_length = 4096": "sequence_length = 256",
    "max_num_steps = 1000": "max_num_steps = 2",
    '"0-7"': '"0-1"',
}
"""What makes cosmos-rl's example a job for two processes of a laptop."""

NEMO_RL_FILE = """
grpo: {num_prompts_per_step: 4, num_generations_per_prompt: 4, max_num_steps: 2}
policy:
  model_name: data/hf_model/tiny-qwen3
  train_global_batch_size: 16
  train_micro_batch_size: 1
  max_total_sequence_length: 64
  sequence_packing: {enabled: true, algorithm: modified_first_fit_decreasing, train_mb_tokens: 128}
loss_fn: {reference_policy_kl_penalty: 0.01}
"""


def smaller(text: str) -> str:
    for large, small in SMALLER.items():
        assert large in text, large
        text = text.replace(large, small)
    return text


def commands(page: Path) -> list[str]:
    """The command lines of a page: its blocks, then those inside sentences, each once."""
    text = page.read_text()
    inside = [" ".join(line.split()) for line in INLINE.findall(text)]
    lines = [*command_lines(text), *(line.removesuffix(" ...") for line in inside if not NAMES_ONLY.fullmatch(line))]
    return list(dict.fromkeys(lines))


def adds_to_the_environment(page: Path) -> bool:
    """Whether a page's commands install packages, as scripts do for themselves."""
    return any(re.match(r"pip|(PYTHON=\S+ )?\./", line) for line in commands(page))


OTHERS = sorted({*PAGES, ROOT / "CONTRIBUTING.md"} - {README})
OTHERS.sort(key=adds_to_the_environment)  # what a page forgets to install is missing as long as none has installed it


@dataclass
class Reader:
    """Somebody with a clone, and a shell whose virtual environment is the clone's."""

    clone: Path
    pythons: Path
    done: set[str] = field(default_factory=set)

    def run(self, command: str, timeout: float = 1500) -> None:
        """Runs a line as written, once. Fails the test when it fails, or warns of what nobody can change."""
        if command in self.done:
            return
        path = [self.clone / ".venv" / "bin", self.pythons, os.environ["PATH"]]
        kept = {name: text for name, text in os.environ.items() if name.startswith(SHELL)}
        environment = {**kept, "PATH": os.pathsep.join(map(str, path))}
        shell = subprocess.Popen(
            ["bash", "-c", command],
            cwd=self.clone,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            printed, _ = shell.communicate(timeout=timeout)
        finally:
            if shell.poll() is None:
                os.killpg(shell.pid, signal.SIGKILL)
        assert shell.returncode == 0, f"{command}\n{printed[-4000:]}"
        assert not re.search(r"\w*Warning: ", printed), f"{command}\n{printed[-4000:]}"
        self.done.add(command)

    def prepare(self, page: Path) -> None:
        """Writes the files and folders that stand for the reader's own, and trains the run that the page asks."""
        if not (self.clone / "data" / "ledger" / "heldout.jsonl").exists():
            self.run("python examples/ledger/make_data.py --out data/ledger")
            self.run("python examples/own_task/make_data.py")
        job = (self.clone / "examples" / "own_task" / "config.yaml").read_text()
        heldout = (self.clone / "data" / "ledger" / "heldout.jsonl").read_text().splitlines(keepends=True)
        toml = re.search(r"```toml\n(.*?)```", page.read_text(), re.DOTALL)
        if toml:
            self.run("python examples/hf_model/make_model.py")
        turns = [{"role": "user", "content": "say ab"}, {"role": "assistant", "content": "ab ab ab"}]
        chats = (json.dumps({"messages": turns}) + "\n") * 64
        for name, text in {
            "job.yaml": job,
            "job.toml": smaller(toml[1]) if toml else "",
            "conversations.jsonl": chats,
            "heldout.jsonl": chats[: len(chats) // 8],
            "more.jsonl": "".join(heldout[:4]),
            "other.jsonl": "".join(heldout[4:12]),
            "my_lengths.csv": (self.clone / "examples" / "lengths.csv").read_text(),
            "rlvr_config.yaml": ROLL_FILE.read_text(),
            "grpo.yaml": NEMO_RL_FILE,
            "run_grpo.sh": VERL_SCRIPT,
            "run-qwen3-4B.sh": SLIME_SCRIPT,
        }.items():
            (self.clone / name).write_text(text)
        if "--output job.yaml" in page.read_text():  # convert-config replaces only what it wrote
            (self.clone / "job.yaml").unlink()
        shutil.rmtree(self.clone / "DIR", ignore_errors=True)
        if re.search(r"\bRUN\b", page.read_text()):
            self.make_run("hf_model" if "hf_model" in page.read_text() else "demo")

    def make_run(self, kind: str) -> None:
        """Makes `RUN` a folder of two steps: of the demo, or of the example with a model directory."""
        if kind == "demo":
            few = "max_steps=2 warmup.training_args.max_steps=2 eval_samples=8 save_steps=1"
            self.run(f"roll-batching train --config configs/demo_grpo.yaml exp_name=reader {few}")
        else:
            self.run("./examples/train_hf_model.sh")
        (self.clone / "RUN").unlink(missing_ok=True)
        (self.clone / "RUN").symlink_to(Path("runs") / ("reader" if kind == "demo" else kind))


def reader(folder: Path) -> Reader:
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder / "clone")], check=True)
    pythons = folder / "pythons"
    pythons.mkdir()
    (pythons / "python3").symlink_to(getattr(sys, "_base_executable", sys.executable))
    return Reader(folder / "clone", pythons)


@pytest.fixture(scope="module")
def newcomer(tmp_path_factory) -> Reader:
    """A clone without anything; README's own commands make its environment."""
    return reader(tmp_path_factory.mktemp("newcomer"))


@pytest.fixture(scope="module")
def user(tmp_path_factory) -> Reader:
    """A clone with the environment of README's page: the extra `megatron` alone."""
    made = reader(tmp_path_factory.mktemp("user"))
    for line in command_lines(README.read_text()):
        if line.startswith(("python3 -m venv", "pip install --editable '.[megatron]'")):
            made.run(line)
    return made


def runs(python: str) -> bool:
    """Whether this machine has that interpreter; a shim without a version behind it does not run."""
    found = shutil.which(python)
    return found is not None and subprocess.run([found, "--version"], capture_output=True, check=False).returncode == 0


def runnable(page: Path, deep: bool) -> list[str]:
    """The lines of a page that run here, what it installs first; tests are collected."""
    lines = []
    for line in commands(page) if page == README else sorted(commands(page), key=lambda line: line[:3] != "pip"):
        if line.startswith(tuple(NOT_HERE)) or PEERS.search(line) or (line in LONG and not deep):
            continue
        if (other := re.match(r"PYTHON=(\S+)", line)) and not runs(other[1]):
            continue
        lines.append(f"{line} --collect-only -q" if line.startswith(TESTS) else line)
    return lines


@pytest.mark.slow
@pytest.mark.pages
def test_a_newcomer_types_what_the_readme_says(newcomer, request):
    for line in runnable(README, request.config.getoption("--deep")):
        newcomer.run(line)


@pytest.mark.slow
@pytest.mark.pages
@pytest.mark.parametrize("page", OTHERS, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_of_a_page_run_as_written(user, page, request):
    lines = runnable(page, request.config.getoption("--deep"))
    installs = [line for line in lines if line.startswith("pip")]
    for line in installs:
        user.run(line)
    if lines:
        user.prepare(page)
    for line in lines:
        user.run(line)


def test_no_exception_is_of_a_command_that_is_gone():
    lines = [line for page in (README, *OTHERS) for line in commands(page)]
    for start in (*NOT_HERE, *LONG, *TESTS):
        assert any(line.startswith(start) for line in lines), start
