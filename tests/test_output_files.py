"""Commands replace only files that they wrote: settings, figures, pictures, responses, adapters."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from roll_batching.cli import main

SCRIPT = "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=/m trainer.total_training_steps=3\n"
LENGTHS = "length\n" + "\n".join(map(str, range(1, 65))) + "\n"
CONVERT, PLAN = ["convert-config", "run.sh"], ["plan", "lengths.csv", "--max-tokens", "64"]
SIMULATE = ["simulate", "--model", "qwen3-1.7b", "--max-tokens", "64", "--lengths", "lengths.csv"]
REHEARSE = ["rehearse", "--no-advice", "--config", str(Path("configs/demo_grpo.yaml").resolve())]
OUTPUTS = {
    "settings": ([*CONVERT, "--output"], "job.yaml"),
    "lists of keys": ([*CONVERT, "--report"], "keys.json"),
    "plan": ([*PLAN, "--plot"], "plan.png"),
    "plan as PDF": ([*PLAN, "--plot"], "plan.pdf"),
    "plan as SVG": ([*PLAN, "--plot"], "plan.svg"),
    "figures": ([*SIMULATE, "--json"], "step.json"),
    "figures of a sweep": ([*SIMULATE, "--sweep", "pp=1", "--json"], "sweep.json"),
    "timeline": ([*SIMULATE, "--plot"], "step.png"),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "run.sh").write_text(SCRIPT)
    (tmp_path / "lengths.csv").write_text(LENGTHS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(arguments, capsys) -> tuple[int, str]:
    """Exit code and errors of a command."""
    code: object = 0
    try:
        main(arguments)
    except SystemExit as end:
        code = end.code
    return int(code or 0), capsys.readouterr().err  # type: ignore[call-overload]


@pytest.mark.parametrize("case", OUTPUTS)
def test_a_command_replaces_its_own_file_and_no_other(case, folder, capsys):
    arguments, name = OUTPUTS[case]
    assert run([*arguments, name], capsys)[0] == 0
    first = (folder / name).read_bytes()
    assert run([*arguments, name], capsys)[0] == 0, "its own file"
    for theirs in (b"my work of a week", b'{"step": {"seconds": 1}}\n', first[:20]):
        (folder / name).write_bytes(theirs)
        code, message = run([*arguments, name], capsys)
        assert code == 2 and (folder / name).read_bytes() == theirs
        assert f"error: {name} was not written by `roll-batching {arguments[0]}`" in message
    (folder / name).write_bytes(b"")
    assert run([*arguments, name], capsys)[0] == 0, "an empty file loses nothing"


@pytest.mark.bad_input
@pytest.mark.parametrize("case", ["plan", "figures", "timeline", "lists of keys"])
def test_no_folder_is_made_no_dangling_link_followed_and_no_pipe_waited_for(case, folder, capsys):
    arguments, name = OUTPUTS[case]
    (folder / f"link-{name}").symlink_to(folder / f"target-{name}")
    os.mkfifo(folder / f"pipe-{name}")
    for output, words in (
        (f"missing/folder/{name}", "the folder missing/folder is not there"),
        (f"link-{name}", "is a link to "),
        (f"pipe-{name}", "is a pipe, and writing waits for its reader"),
    ):
        code, message = run([*arguments, output], capsys)
        assert code == 2 and words in message, message
    assert not (folder / "missing").exists() and not (folder / f"target-{name}").exists()
    assert run([*arguments, "/dev/null"], capsys)[0] == (2 if case in ("plan", "timeline") else 0), (
        "pictures have suffixes"
    )


@pytest.mark.slow
@pytest.mark.rehearse
def test_a_rehearsal_plots_over_its_own_picture_only(folder, capsys):
    (folder / "a.png").write_bytes(b"my picture")
    code, message = run([*REHEARSE, "--plot", "a.png"], capsys)
    assert code == 2 and "was not written by `roll-batching rehearse`" in message
    assert (folder / "a.png").read_bytes() == b"my picture"
    assert [run([*REHEARSE, "--plot", "b.png"], capsys)[0] for _ in range(2)] == [0, 0]


@pytest.mark.parametrize("name", ["run.sh", "./x/../run.sh", "link.sh"])
def test_a_conversion_does_not_replace_its_source(folder, capsys, name):
    (folder / "x").mkdir()
    (folder / "link.sh").symlink_to("run.sh")
    for option in ("--output", "--report"):
        code, message = run([*CONVERT, option, name], capsys)
        assert code == 2 and "was not written by" in message and (folder / "run.sh").read_text() == SCRIPT
    assert run([*CONVERT, "--report", "a.json", "--output", "a.json"], capsys)[0] == 2
    assert not (folder / "a.json").exists()


def test_an_edited_conversion_is_kept_unless_forced(folder, capsys):
    command = [*CONVERT, "--output", "job.yaml"]
    assert run(command, capsys)[0] == 0
    written = (folder / "job.yaml").read_text()
    edited = written.replace("max_steps: 3", "max_steps: 4")
    assert edited != written
    (folder / "job.yaml").write_text(edited)
    code, message = run(command, capsys)
    assert code == 2 and "--force" in message and (folder / "job.yaml").read_text() == edited
    assert run([*command, "--force"], capsys)[0] == 0 and (folder / "job.yaml").read_text() == written


def test_responses_replace_responses_only(tmp_path):
    from roll_batching.commands.generate import check_responses
    from roll_batching.errors import ConfigError

    path, line = tmp_path / "out.jsonl", {"version": 3, "prompt": "a", "response": "b", "finished": True}
    for record in ({**line, "response_tokens": 1}, {**line, "response_tokens": 1, "reward": 1.0}):
        path.write_text(json.dumps(record) + "\n")
        check_responses(path, "generate")
    for text in ('{"prompt": "a", "answer": "b"}\n', "notes", "[1]\n", "3\n"):
        path.write_text(text)
        with pytest.raises(ConfigError, match="was not written by `roll-batching generate`"):
            check_responses(path, "generate")


@pytest.mark.parametrize("name", ["a.jpg", "a.webp"])
def test_formats_that_hold_no_mark_are_never_replaced(folder, capsys, name):
    assert run([*PLAN, "--plot", name], capsys)[0] == 0
    first = (folder / name).read_bytes()
    code, message = run([*PLAN, "--plot", name], capsys)
    assert code == 2 and "choose another file" in message.lower() and (folder / name).read_bytes() == first


def test_a_folder_and_an_unreadable_path_are_named(folder, capsys):
    (folder / "a.png").mkdir()
    assert "a.png is a folder" in run([*PLAN, "--plot", "a.png"], capsys)[1]
    assert run([*CONVERT, "--output", "/dev/null"], capsys)[0] == 0, "a device loses nothing"
