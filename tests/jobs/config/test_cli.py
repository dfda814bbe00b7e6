"""The command line ends with a message and an exit code, never with a traceback."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from roll_batching import __version__
from roll_batching.cli import main
from roll_batching.commands import COMMANDS
from roll_batching.planning.registry import ALGORITHMS

ROOT = Path(__file__).parents[3]


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "roll_batching.cli", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--config", "configs/nowhere.yaml"], "configs/nowhere.yaml: no such file"),
        (["--config", "configs/demo_grpo.yaml", "max_stepz=3"], "did you mean 'max_steps'?"),
        (["--config", "configs/demo_grpo.yaml", "reward_function=~"], "reward_function: is missing"),
        (["--config", "configs/demo_grpo.yaml", "actor_train.use_dynamic_batching=true"], "exclude each other"),
        (
            [
                "--config",
                "configs/demo_grpo.yaml",
                "--nproc",
                "3",
                "actor_train.device_mapping=0-3",
                "actor_train.strategy_args.strategy_config.tensor_model_parallel_size=2",
            ],
            "3 processes do not divide into copies of TP 2",
        ),
    ],
)
def test_wrong_configurations_exit_with_2(arguments, words, capsys, monkeypatch, report):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as ended:
        main(["train", *arguments])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and words in said
    report(said.strip().splitlines()[-1].strip())


@pytest.mark.bad_input
def test_a_process_says_it_without_a_traceback():
    done = run("train", "--config", "configs/demo_grpo.yaml", "max_stepz=3")
    assert done.returncode == 2
    assert done.stderr.startswith("error: the configuration has a problem:") and "Traceback" not in done.stderr


@pytest.mark.parametrize(("rank", "says"), [("0", True), ("1", False)])
def test_only_rank_0_complains(rank, says, capsys, monkeypatch):
    monkeypatch.setenv("RANK", rank)
    for name, value in {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        main(["train", "--config", str(ROOT / "configs" / "demo_grpo.yaml"), "max_stepz=3"])
    assert ended.value.code == 2
    assert ("max_stepz" in capsys.readouterr().err) is says


def test_unknown_options_exit_with_2(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["train", "--config", "configs/demo_grpo.yaml", "--speed", "9"])
    assert ended.value.code == 2 and "--speed" in capsys.readouterr().err


def test_help_names_the_commands(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0 and "train" in capsys.readouterr().out


@pytest.mark.parametrize("name", COMMANDS)
def test_the_line_of_a_command_is_the_first_of_its_own_help(name):
    target, summary = COMMANDS[name]
    module, _, function = target.partition(":")
    command = getattr(importlib.import_module(f"roll_batching.commands.{module}"), function)
    assert inspect.getdoc(command).split("\n\n")[0] == summary


def python(*arguments, **variables):
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_python_runs_the_package_as_a_command():
    assert python("-m", "roll_batching", "--version") == f"roll-batching {__version__}\n"
    assert python("-m", "roll_batching", "--help") == python("-m", "roll_batching.cli", "--help")


def test_help_imports_no_command_and_is_quick(report):
    code = (
        "import sys\nfrom roll_batching.cli import main\ntry:\n    main(['--help'])\nfinally:\n"
        "    print([name for name in sys.modules if name.startswith('roll_batching.')], file=sys.stdout)"
    )
    imported = set(ast.literal_eval(python("-c", code).splitlines()[-1]))
    rooms = {"cli", "commands", "errors", "known_warnings", "secret_names"}
    assert imported == {f"roll_batching.{room}" for room in rooms}
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        python("-m", "roll_batching", "--help")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    report(f"--help: {min(seconds):.2f} s of processor time")
    assert min(seconds) < 0.4


@pytest.mark.parametrize(
    ("words", "offered"), [("roll-batching tr", "train"), ("roll-batching plan --max-t", "--max-tokens")]
)
def test_a_shell_completes_commands_and_options(words, offered):
    variables = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    assert python("-m", "roll_batching", _ROLL_BATCHING_COMPLETE="complete_bash", **variables).split() == [offered]


def test_completion_is_installed_for_the_shell(tmp_path):
    command = f"{sys.executable} -m roll_batching --install-completion; true"
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=ROOT,
        env={**os.environ, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    (file,) = (path for path in tmp_path.rglob("*") if path.name.startswith("roll-batching"))
    assert "complete -o default -F _roll_batching_completion roll-batching" in file.read_text(), done.stderr
    assert str(file) in (tmp_path / ".bashrc").read_text()


def test_help_names_every_algorithm_and_what_it_does(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for registry in ALGORITHMS.values():
        for entry in registry:
            assert f"{entry.name} ({entry.summary})" in said
    assert "package.module:function" in said


@pytest.mark.parametrize("command", [[], ["plan"], ["convert-config"], ["train"]], ids=" ".join)
def test_help_needs_no_torch(command):
    code = (
        f"import sys; sys.modules['torch'] = None\nfrom roll_batching.cli import main\nmain({[*command, '--help']!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "Usage: roll-batching" in done.stdout, done.stderr


def test_plan_takes_a_packer_by_its_dotted_path(tmp_path, capsys):
    (tmp_path / "lengths.csv").write_text("tokens\n" + "".join(f"{60 + 10 * i}\n" for i in range(8)))
    arguments = ["plan", str(tmp_path / "lengths.csv"), "--max-tokens", "256", "--dp", "2", "--json"]
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--algorithm", "tests.planning.own_packers:tightest"])
    said = json.loads(capsys.readouterr().out)
    assert ended.value.code == 0
    assert said["constraints"]["algorithm"] == "tests.planning.own_packers:tightest"
    assert said["reports"]["packed"]["samples"] == 8


@pytest.mark.bad_input
def test_plan_says_when_it_is_not_there(tmp_path, capsys, report):
    (tmp_path / "lengths.csv").write_text("tokens\n10\n")
    with pytest.raises(SystemExit) as ended:
        main(["plan", str(tmp_path / "lengths.csv"), "--algorithm", "tests.planning.own_packers:nothing"])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and "has no 'nothing'" in said
    report(said.strip())
