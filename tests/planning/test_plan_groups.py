"""The command plan with columns of groups, whose samples begin alike."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from roll_batching.cli import app, main

pytestmark = pytest.mark.planning


def groups_csv(folder: Path, prefix: int = 500) -> Path:
    file = folder / "groups.csv"
    rows = [f"{prefix + 100},{number // 4},{prefix}" for number in range(40)]
    file.write_text("\n".join(["length,prompt,prompt_tokens", *rows]) + "\n")
    return file


def test_plan_computes_the_prefixes_of_groups_once(tmp_path):
    file = groups_csv(tmp_path)
    options = ["--column", "length", "--dp", "2", "--max-tokens", "2400", "--compare", "--json"]
    result = CliRunner().invoke(app, ["plan", str(file), *options, "--group", "prompt", "--prefix", "prompt_tokens"])
    assert result.exit_code == 0, result.output
    printed = json.loads(result.output)
    assert printed["columns"] == ["length"]
    packed = printed["reports"]["packed"]
    assert packed["real_tokens"] == 40 * 600 and packed["shared_tokens"] == 30 * 499
    assert packed["computed_tokens"] == 40 * 600 - 30 * 499
    assert printed["reports"]["dynamic"]["shared_tokens"] == 0
    few = ["--group", "prompt", "--prefix", "prompt_tokens", "--first", "6"]
    first = json.loads(CliRunner().invoke(app, ["plan", str(file), *options, *few]).output)
    assert first["reports"]["packed"]["shared_tokens"] == 4 * 499


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--group", "prompt"], "--group and --prefix belong together"),
        (["--group", "none", "--prefix", "prompt_tokens"], "none"),
        (["--group", "prompt", "--prefix", "prompt_tokens"], "which columns are lengths?"),
        ([*"--group prompt --prefix prompt_tokens --column length --mode dynamic".split()], "mode 'packed' only"),
    ],
)
def test_bad_columns_of_groups_end_with_2(tmp_path, capsys, options, words):
    with pytest.raises(SystemExit) as ended:
        main(["plan", str(groups_csv(tmp_path)), *options])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and words in said and said.count("\n") == 1


@pytest.mark.bad_input
def test_a_prefix_longer_than_its_sequence_ends_with_2(tmp_path, capsys):
    file = groups_csv(tmp_path)
    file.write_text(file.read_text().replace("600,9,500", "600,9,601"))
    with pytest.raises(SystemExit) as ended:
        main(["plan", str(file), "--column", "length", "--group", "prompt", "--prefix", "prompt_tokens"])
    assert ended.value.code == 2 and "sample 36 of 600 tokens has a prefix of 601" in capsys.readouterr().err
