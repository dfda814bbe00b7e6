"""Lengths from files, the plan command, its picture, and convert-config."""

from __future__ import annotations

import json

import numpy as np
import pyarrow
import pytest
import typer
import yaml
from pyarrow import parquet
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
    parquet.write_table(pyarrow.table({"p": [1, 2], "r": [3, 4], "name": ["a", "b"]}), tmp_path / "a.parquet")
    assert read_lengths(tmp_path / "a.parquet").tolist() == [4, 6]


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("empty.csv", "", "holds no lengths"),
        ("head.csv", "tokens\n", "holds no lengths"),
        ("ragged.csv", "1,2\n3\n", "ragged.csv:2: '3' has 1 columns, the first row 2"),
        ("gap.csv", "1,2\n3,\n", "gap.csv:2: '3,' is no row of integers"),
        ("text.csv", "5\n6\nseven\n", "text.csv:3: 'seven' is no row"),
        ("float.csv", "5\n6.5\n", "float.csv:2: '6.5' is no row"),
        ("negative.csv", "5\n-3\n", "row 2 has length -3"),
        (
            "keys.jsonl",
            '{"length": 5}\n{"len": 3}\n',
            "keys.jsonl:2: integers under len; the first line",
        ),
        ("open.jsonl", '5\n{"x": \n', "open.jsonl:2: no JSON"),
        ("words.jsonl", '{"x": "y"}\n', "words.jsonl:1: no integer"),
        ("junk.npy", "junk", "junk.npy is no npy file of numbers"),
        ("junk.parquet", "junk", "junk.parquet is no Parquet file"),
    ],
)
def test_bad_files_are_named_with_the_place(tmp_path, name, text, words, report):
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=words) as caught:
        read_lengths(tmp_path / name)
    report(f"lengths: {str(caught.value).replace(str(tmp_path), '...')}")


def test_columns_can_be_chosen(tmp_path):
    (tmp_path / "trace.csv").write_text("time,prompt,response\n2023-11-16 18:17:03,5,1\n2023-11-16 18:17:04,7,2\n")
    assert read_lengths(tmp_path / "trace.csv", ["prompt", "response"]).tolist() == [6, 9]
    with pytest.raises(DataError, match="trace.csv:2: .* is no row of integers"):
        read_lengths(tmp_path / "trace.csv")
    (tmp_path / "bare.csv").write_text("1,5\n2,7\n")
    assert read_lengths(tmp_path / "bare.csv", ["2"]).tolist() == [5, 7]
    (tmp_path / "rows.jsonl").write_text('{"id": 1, "length": 5}\n{"id": 2, "length": 7, "more": 1}\n')
    assert read_lengths(tmp_path / "rows.jsonl", ["length"]).tolist() == [5, 7]
    np.save(tmp_path / "two.npy", np.array([[1, 5], [2, 7]]))
    assert read_lengths(tmp_path / "two.npy", ["2"]).tolist() == [5, 7]
    parquet.write_table(pyarrow.table({"id": [1, 2], "length": [5, 7]}), tmp_path / "two.parquet")
    assert read_lengths(tmp_path / "two.parquet", ["length"]).tolist() == [5, 7]
    for name in ("trace.csv", "bare.csv", "rows.jsonl", "two.npy", "two.parquet"):
        with pytest.raises(DataError, match="has no column of integers 'tokens'; it has"):
            read_lengths(tmp_path / name, ["tokens"])


def test_what_was_summed_is_said(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"id": 1, "length": 5}\n{"id": 2, "length": 7}\n')
    run = CliRunner().invoke(app_of(plan), [str(tmp_path / "rows.jsonl")])
    assert "length = id + length" in run.stdout
    run = CliRunner().invoke(app_of(plan), [str(tmp_path / "rows.jsonl"), "--column", "length", "--json"])
    shown = json.loads(run.stdout)
    assert shown["columns"] == ["length"] and shown["reports"]["packed"]["real_tokens"] == 12


@pytest.mark.bad_input
def test_bad_binary_files(tmp_path):
    np.save(tmp_path / "float.npy", np.array([1.5, 2.0]))
    with pytest.raises(DataError, match="float.npy holds no column of integers"):
        read_lengths(tmp_path / "float.npy")
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="bytes.csv is no text: invalid start byte at byte 0"):
        read_lengths(tmp_path / "bytes.csv")
    parquet.write_table(pyarrow.table({"p": [1, None], "q": [1, 2]}), tmp_path / "gap.parquet")
    with pytest.raises(DataError, match="1 rows have no value in column 'p'"):
        read_lengths(tmp_path / "gap.parquet")
    parquet.write_table(pyarrow.table({"t": ["a"]}), tmp_path / "text.parquet")
    with pytest.raises(DataError, match="no integer column .columns: t."):
        read_lengths(tmp_path / "text.parquet")


def test_a_picture_of_no_known_format_is_refused_before_anything_is_planned(lengths_csv, tmp_path):
    result = CliRunner().invoke(app_of(plan), [str(lengths_csv[0]), "--plot", str(tmp_path / "x.txt")])
    assert isinstance(result.exception, DataError) and "end it in one of" in str(result.exception)


def test_a_missing_file_is_said(tmp_path):
    with pytest.raises(DataError, match="none.csv does not exist"):
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


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("policy: {sequence_packing: {enabled: true, train_mb_tokens: '${mul:2, 3}'}}", "is '${mul:2, 3}'; write"),
        ("policy: {sequence_packing: 3}", "sequence_packing is 3; it is a section"),
        ("policy: {dynamic_batching: {enabled: true}}", "dynamic_batching.train_mb_tokens is missing"),
        (
            "policy: {dynamic_batching: {enabled: true, train_mb_tokens: 8, sequence_length_round: x}}",
            "dynamic_batching.sequence_length_round is 'x'",
        ),
        ("policy: &a [*a]", "holds an alias of itself"),
        ("- 3", "keys and values at its top level"),
    ],
)
def test_convert_config_names_what_it_cannot_read(tmp_path, text, words):
    (tmp_path / "grpo.yaml").write_text(text)
    result = CliRunner().invoke(app_of(convert_config), [str(tmp_path / "grpo.yaml")])
    assert isinstance(result.exception, ConfigError) and words in str(result.exception)
    assert "grpo.yaml" in str(result.exception)
