"""Lengths from files, the plan command, its picture, and convert-config."""

from __future__ import annotations

import json

import numpy as np
import pytest
import typer
import yaml
from typer.testing import CliRunner

from roll_batching.errors import ConfigError, DataError
from roll_batching.launch.convert_command import convert_config
from roll_batching.launch.plan_command import plan
from roll_batching.planning.lengths_io import read_lengths

pytestmark = pytest.mark.planning


def app_of(command) -> typer.Typer:
    app = typer.Typer()
    app.command()(command)
    return app


@pytest.fixture
def lengths_csv(tmp_path):
    lengths = np.clip(np.random.default_rng(0).lognormal(7, 0.8, 200), 16, 8192).astype(int)
    file = tmp_path / "lengths.csv"
    file.write_text("prompt_tokens,response_tokens\n" + "".join(f"10,{n - 10}\n" for n in lengths))
    return file, lengths


def test_reads_every_format(tmp_path, lengths_csv):
    file, lengths = lengths_csv
    assert read_lengths(file).tolist() == lengths.tolist()
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"p": 1, "r": int(n)}) + "\n" for n in lengths))
    assert read_lengths(tmp_path / "a.jsonl").tolist() == (lengths + 1).tolist()
    np.save(tmp_path / "a.npy", lengths)
    assert read_lengths(tmp_path / "a.npy").tolist() == lengths.tolist()
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    parquet.write_table(pyarrow.table({"p": [1, 2], "r": [3, 4], "name": ["a", "b"]}), tmp_path / "a.parquet")
    assert read_lengths(tmp_path / "a.parquet").tolist() == [4, 6]


def test_errors_name_the_file_and_the_line(tmp_path):
    (tmp_path / "bad.csv").write_text("5\n6\nseven\n")
    with pytest.raises(DataError, match="bad.csv:3"):
        read_lengths(tmp_path / "bad.csv")
    (tmp_path / "bad.jsonl").write_text('5\n{"x": \n')
    with pytest.raises(DataError, match="bad.jsonl:2"):
        read_lengths(tmp_path / "bad.jsonl")
    (tmp_path / "zero.csv").write_text("5\n0\n")
    with pytest.raises(DataError, match="row 2 has length 0"):
        read_lengths(tmp_path / "zero.csv")
    with pytest.raises(DataError, match="does not exist"):
        read_lengths(tmp_path / "none.csv")


@pytest.mark.parametrize("dp", [8, 64])
def test_plan_prints_one_json_object_and_draws(lengths_csv, tmp_path, dp):
    picture = tmp_path / "plan.png"
    result = CliRunner().invoke(
        app_of(plan),
        [str(lengths_csv[0]), "--dp", str(dp), "--compare", "--json", "--plot", str(picture)],
    )
    assert result.exit_code == 0, result.output
    printed = json.loads(result.output)
    reports = printed["reports"]
    assert set(reports) == {"padded", "dynamic", "packed"}
    assert (
        reports["packed"]["computed_tokens"]
        <= reports["dynamic"]["computed_tokens"]
        <= reports["padded"]["computed_tokens"]
    )
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 10_000


def test_plan_prints_a_table(lengths_csv):
    result = CliRunner().invoke(app_of(plan), [str(lengths_csv[0]), "--compare"])
    assert result.exit_code == 0, result.output
    for word in ("padded", "dynamic", "packed", "computed tokens", "lockstep imbalance"):
        assert word in result.output


def test_convert_config(tmp_path):
    source = tmp_path / "grpo.yaml"
    sections = {
        "sequence_packing": {"enabled": True, "train_mb_tokens": 2048, "sequence_length_round": 64},
        "dynamic_batching": {"enabled": False},
    }
    source.write_text(yaml.safe_dump({"policy": sections}))
    result = CliRunner().invoke(app_of(convert_config), [str(source)])
    assert result.exit_code == 0, result.output
    assert result.output.startswith("# sequence_packing.sequence_length_round")
    worker = yaml.safe_load(result.output)["actor_train"]
    assert worker["sequence_packing_args"]["max_packed_sequence_length_train"] == 2048
    source.write_text("model: 7b\n")
    result = CliRunner().invoke(app_of(convert_config), [str(source)])
    assert isinstance(result.exception, ConfigError)
