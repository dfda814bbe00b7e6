"""Lengths from files, the commands plan and convert-config."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import typer
import yaml
from pyarrow import parquet
from typer.testing import CliRunner

from roll_batching import cli
from roll_batching.cli import main
from roll_batching.commands.convert_config import convert_config
from roll_batching.commands.plan import TABLE_ROWS, plan
from roll_batching.errors import ConfigError, DataError
from roll_batching.planning.lengths_io import read_length_file, read_lengths

pytestmark = pytest.mark.planning

ROOT = Path(__file__).parents[2]


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
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"prompt_length": 1, "n_tokens": int(n)}) + "\n" for n in lengths)
    )
    assert read_lengths(tmp_path / "a.jsonl").tolist() == (lengths + 1).tolist()
    np.save(tmp_path / "a.npy", lengths)
    assert read_lengths(tmp_path / "a.npy").tolist() == lengths.tolist()
    columns = {"input_len": [1, 2], "output_len": [3, 4], "name": ["a", "b"]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    assert read_lengths(tmp_path / "a.parquet").tolist() == [4, 6]


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("empty.csv", "", "holds no lengths"),
        ("head.csv", "tokens\n", "holds no lengths"),
        ("ragged.csv", "1,2\n3\n", "ragged.csv:2: '3' has 1 columns, the first row 2"),
        ("gap.csv", "tokens,n\n1,2\n,3\n", "gap.csv:3: '' is not an integer .column 'tokens'."),
        ("text.csv", "5\n6\nseven\n", "text.csv:3: 'seven' is not an integer"),
        ("float.csv", "5\n6.5\n", "float.csv:2: '6.5' is not an integer"),
        ("semicolons.csv", "tokens;id\n5;1\n", "semicolons.csv:2: '5;1' has ';' between.* ',' separates"),
        ("bare.csv", "5;1\n6;2\n", "bare.csv:1: '5;1' has ';' between.* ',' separates"),
        ("tabs.csv", "5\t1\n", r"tabs.csv:1: '5.t1' has '.t' between.* ',' separates"),
        ("thousands.csv", "tokens\n1,524\n", "thousands.csv:2: '1,524' has 2 columns, .* 1524"),
        ("quoted.csv", 'tokens\n"1,024"\n', "quoted.csv:2: '1,024' .* 1024"),
        ("later.csv", "512\n1,524\n", "later.csv:2: '1,524' has 2 columns, .* 1524"),
        ("first.csv", "1,524\n512\n", "first.csv:2: '512' has 1 columns, the first row 2; ',' separates"),
        ("zeros.csv", "1,024\n2,048\n", "zeros.csv:1: '1,024' .* 1024"),
        ("all.csv", "1,524\n7,248\n3,900\n", "'1' .1, 7, .*'2' .524, 248, .* ',' separates .* 1024"),
        ("mixed.csv", "abc,5\ndef,6\n", "mixed.csv:1: 'abc,5' mixes names and numbers: .* names, or only numbers"),
        ("negative.csv", "5\n-3\n", "row 2 has -3 in column '1'"),
        (
            "keys.jsonl",
            '{"length": 5}\n{"len": 3}\n',
            "keys.jsonl:2: no integer under 'length'",
        ),
        ("open.jsonl", '5\n{"x": \n', "open.jsonl:2: not JSON"),
        ("words.jsonl", '{"x": "y"}\n', "words.jsonl: there is no column of integers; there are 'x'"),
        ("junk.npy", "junk", "junk.npy is not an npy file of numbers"),
        ("junk.parquet", "junk", "junk.parquet is not a Parquet file"),
    ],
)
def test_bad_files_are_named_with_the_place(tmp_path, name, text, words, report):
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=words) as caught:
        read_lengths(tmp_path / name)
    report(f"lengths: {str(caught.value).replace(str(tmp_path), '...')}")


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.txt"])
@pytest.mark.parametrize("layout", [{"indent": 1}, {}])
def test_a_json_array_is_a_file_of_lengths(tmp_path, name, layout):
    numbers = np.random.default_rng(0).integers(1, 9000, 300_000 if not layout else 30)
    (tmp_path / name).write_text("\ufeff\n " + json.dumps(numbers.tolist(), **layout) + "\n", encoding="utf-8")
    assert np.array_equal(read_lengths(tmp_path / name), numbers), "also on one line of more than a megabyte"
    rows = [{"prompt_tokens": 3, "answer_tokens": int(number)} for number in numbers[:30]]
    (tmp_path / name).write_text(json.dumps(rows, **layout))
    assert np.array_equal(read_lengths(tmp_path / name), numbers[:30] + 3)
    result = CliRunner().invoke(app_of(plan), [str(tmp_path / name), "--dp", "2", "--json"])
    assert result.exit_code == 0 and json.loads(result.stdout)["reports"]["packed"]["samples"] == 30


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[5, 7", "a.json:1: not JSON"),
        ("[5,\n7,\nx]", "a.json:3: not JSON"),
        ("[]", "a.json holds no lengths"),
        ("[5, null]", "a.json:2: no integer under 'length' in 'null'"),
        ("[5, 1.5]", "a.json:2: no integer under 'length' in '1.5'"),
        ("[[5], [7]]", "no column of integers|no integer under"),
        ("[5]\n[7]", "no column of integers|no integer under"),
    ],
)
def test_a_bad_json_array_is_named_with_the_place(tmp_path, text, words, report):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(DataError, match=words) as caught:
        read_lengths(tmp_path / "a.json")
    report(str(caught.value).replace(str(tmp_path), "..."))


def test_columns_can_be_chosen(tmp_path):
    (tmp_path / "trace.csv").write_text("time,prompt,response\n2023-11-16 18:17:03,5,1\n2023-11-16 18:17:04,7,2\n")
    assert read_lengths(tmp_path / "trace.csv", ["prompt", "response"]).tolist() == [6, 9]
    with pytest.raises(DataError, match="trace.csv: column 'time' holds no integers"):
        read_lengths(tmp_path / "trace.csv", ["time"])
    (tmp_path / "bare.csv").write_text("1,5\n2,7\n")
    assert read_lengths(tmp_path / "bare.csv", ["2"]).tolist() == [5, 7]
    (tmp_path / "rows.jsonl").write_text('{"id": 1, "length": 5}\n{"id": 2, "length": 7, "more": 1}\n')
    assert read_lengths(tmp_path / "rows.jsonl", ["length"]).tolist() == [5, 7]
    np.save(tmp_path / "two.npy", np.array([[1, 5], [2, 7]]))
    assert read_lengths(tmp_path / "two.npy", ["2"]).tolist() == [5, 7]
    parquet.write_table(pyarrow.table({"id": [1, 2], "length": [5, 7]}), tmp_path / "two.parquet")
    assert read_lengths(tmp_path / "two.parquet", ["length"]).tolist() == [5, 7]
    for name in ("trace.csv", "bare.csv", "rows.jsonl", "two.npy", "two.parquet"):
        with pytest.raises(DataError, match=f"{name}: there is no column 'tokens'; there are"):
            read_lengths(tmp_path / name, ["tokens"])


def test_what_was_summed_is_said(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"id": 1, "length": 5}\n{"id": 2, "length": 7}\n')
    run = CliRunner().invoke(app_of(plan), [str(tmp_path / "rows.jsonl")])
    assert "length = length\n" in run.stdout and "left out: id (not named like a length)" in run.stdout
    run = CliRunner().invoke(app_of(plan), [str(tmp_path / "rows.jsonl"), "--column", "length", "--json"])
    shown = json.loads(run.stdout)
    assert (
        shown["columns"] == ["length"] and shown["left_out"] == {} and shown["reports"]["packed"]["real_tokens"] == 12
    )


CHOICES = [
    ({"prompt_tokens": [5, 6], "response_tokens": [1, 1]}, "prompt_tokens response_tokens"),
    (
        {"TIMESTAMP": ["a", "b"], "ContextTokens": [374, 396], "GeneratedTokens": [44, 109]},
        "ContextTokens GeneratedTokens",
    ),
    (
        {"timestamp": [27482, 30535], "input_length": [6955, 6472], "output_length": [52, 26]},
        "input_length output_length",
    ),
    ({"id": [7, 3], "length": [5, 6]}, "length"),
    ({"tokens": ["5 6", "7"], "length": [2, 1]}, "length"),
    ({"num_tokens": [5, 6], "token_id": [1, 9], "max_tokens": [16, 16]}, "num_tokens"),
    ({"prompt_tokens": [5, 6], "completion_tokens": [1, 3], "total_tokens": [6, 9]}, "total_tokens"),
    ({"length": [5, 6], "num_tokens": [5, 6]}, "length"),
    ({"": [0, 1, 2], "words": [9, 4, 5]}, "words"),
    ({"a": [0, 1, 2], "b": [8, 8, 8], "c": [9, 4, 5]}, "c"),
    ({"a": [10, 13, 17], "b": [9, 4, 5]}, "b"),
    ({"a": [10, 11, 17], "b": [9, 4, 5]}, "b"),
    ({"sorted": [10, 13, 17]}, "sorted"),
    ({"n": [7, 7, 7]}, "n"),
    ({"prompt": [5, 9], "response": [1, 3]}, None),
    ({"prompt_tokens": [5, 6], "total_tokens": [9, 9]}, None),
    ({"id": [1, 5]}, None),
    ({"id": [1, 5], "index": [3, 1]}, None),
]


@pytest.mark.parametrize(
    ("table", "chosen"), CHOICES, ids=lambda item: " ".join(item) if isinstance(item, dict) else ""
)
def test_lengths_are_told_from_ids_and_constants(tmp_path, table, chosen):
    file = tmp_path / "rows.csv"
    rows = zip(*table.values(), strict=True)
    file.write_text("".join(",".join(map(str, row)) + "\n" for row in (list(table), *rows)))
    if chosen is None:
        with pytest.raises(DataError, match="which columns are lengths. There are .*--column NAME") as caught:
            read_length_file(file)
        assert all(repr(name) in str(caught.value) for name in table)
        return
    found = read_length_file(file)
    assert " ".join(found.columns) == chosen
    assert set(found.columns) | set(found.left_out) == set(table)
    assert found.lengths.tolist() == np.sum([table[name] for name in found.columns], axis=0).tolist()


def npy(array, **options):
    stream = io.BytesIO()
    np.save(stream, array, **options)
    return stream.getvalue()


def npz():
    stream = io.BytesIO()
    np.savez(stream, a=np.array([1]))
    return stream.getvalue()


RUBBISH = {
    "beyond int64": (
        "a.csv",
        b"5\n9223372036854775808\n",
        "'9223372036854775808' is not an integer within 64 bits",
    ),
    "beyond int32": (
        "a.csv",
        b"5\n9223372036854775807\n",
        "row 2 has 9223372036854775807 in column '1'",
    ),
    "a sum beyond int32": ("a.csv", b"a_tokens,b_tokens\n2147483647,9\n", "row 1 has 2147483656 as its length"),
    "5,000 digits": ("a.csv", b"5\n" + b"9" * 5000, "a.csv:2: '9999"),
    "a negative part": ("a.csv", b"a_tokens,b_tokens\n-3,9\n", "row 1 has -3 in column 'a_tokens'"),
    "NaN": ("a.csv", b"5\nnan\n", "a.csv:2: 'nan' is not an integer"),
    "NaN first": ("a.csv", b"nan\n5\n", "a.csv:1: 'nan' is neither an integer nor a column's name"),
    "a fraction first": ("a.csv", b"1.5\n5\n", "a.csv:1: '1.5' is neither"),
    "zero": ("a.csv", b"5\n0\n", "row 2 has 0 as its length"),
    "two names": ("a.csv", b"len,len\n5,6\n", "two columns are named 'len'"),
    "a long line": ("a.csv", b"5," * 2**20, "a.csv:1: the line has more than 1,048,576"),
    "a long field": ("a.csv", b'length\n"' + b"5\n" * 100_000, "field larger than field limit"),
    "an open quote": ("a.csv", b'length\n4\n"5\n6\n', "is not an integer"),
    "NUL": ("a.csv", b"5\n\0\n", "a.csv:2: "),
    "UTF-16": ("a.csv", "5\n6\n".encode("utf-16"), "no UTF-8 text from about line 1 on"),
    "a gigabyte of nothing": ("a.csv", 2**30, "a.csv:1: the line has more than 1,048,576"),
    "a gigabyte of JSON": ("a.jsonl", 2**30, "a.jsonl:1: the line has more than 1,048,576"),
    "a gigabyte of npy": ("a.npy", 2**30, "is not an npy file of numbers"),
    "deep JSON": ("a.jsonl", b"[" * 100_000, "a.jsonl:1: not JSON (nested too deep)"),
    "JSON digits": ("a.jsonl", b"9" * 5000, "a.jsonl:1: not JSON"),
    "JSON beyond int64": ("a.jsonl", b"18446744073709551616", "a.jsonl:1: no integer under 'length'"),
    "JSON NaN": ("a.jsonl", b"NaN", "a.jsonl:1: no integer under 'length'"),
    "JSON text": ("a.jsonl", b'{"length": "many"}', "a.jsonl: there is no column of integers; there are 'length'"),
    "JSON true": ("a.jsonl", b'{"length": true}', "a.jsonl:1: no integer under 'length'"),
    "JSON of nothing": ("a.jsonl", b"{}\n{}", "a.jsonl"),
    "a late key": ("a.jsonl", b'{"id": 3}\n{"id": 4, "length": 5}', "a.jsonl:2: 'length' is not in every line"),
    "uint64 of 2^63": (
        "a.npy",
        npy(np.array([5, 2**63], np.uint64)),
        "row 2 has 9223372036854775808 in column",
    ),
    "a negative row": ("a.npy", npy(np.array([5, -3])), "row 2 has -3 in column 'length'"),
    "objects": ("a.npy", npy(np.array([5, {}], dtype=object), allow_pickle=True), "is not an npy file of numbers"),
    "floats": ("a.npy", npy(np.array([5.0, np.nan])), "holds no column of integers (found shape (2,), float64)"),
    "no dimension": ("a.npy", npy(np.array(5)), "holds no column of integers (found shape (), int64)"),
    "three dimensions": ("a.npy", npy(np.ones((2, 2, 2), int)), "found shape (2, 2, 2), int64"),
    "no rows": ("a.npy", npy(np.array([], int)), "a.npy"),
    "no columns": ("a.npy", npy(np.ones((3, 0), int)), "a.npy"),
    "a claim": (
        "a.npy",
        npy(np.array([5])).replace(b"(1,)", b"(10000000000000,)")[:128],
        "is not an npy file of numbers",
    ),
    "an archive": ("a.npy", npz(), "holds no column of integers (found an archive)"),
}


@pytest.mark.bad_input
@pytest.mark.parametrize("name", RUBBISH)
def test_rubbish_ends_the_command_with_2_and_one_message(tmp_path, capsys, name, report):
    file, content, words = RUBBISH[name]
    path = tmp_path / file
    if isinstance(content, int):
        with path.open("wb") as stream:
            stream.truncate(content)
    else:
        path.write_bytes(content)
    start = time.perf_counter()
    with pytest.raises(SystemExit) as ended:
        main(["plan", str(path)])
    said = capsys.readouterr()
    assert ended.value.code == 2 and time.perf_counter() - start < 10
    assert said.err.startswith("error: ") and said.err.count("\n") == 1 and not said.out
    assert words in said.err and str(path) in said.err
    report(f"lengths, {name}: {said.err.strip().replace(str(tmp_path), '...')[:150]}")


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("option", "words"),
    [
        (["--mode", "bogus"], "bogus"),
        (["--dp", "1000000000"], "65536"),
        (["--max-tokens", "100"], "exceeds max_tokens=100"),
        (["--plot", "plan.txt"], "has no suffix of an image format: use one of"),
        (["--plot", "/proc/plan.png"], "/proc/plan.png cannot be written: "),
        (["--dynamic-cp", "--dp", "4", "--plot", "/proc/plan.png"], "/proc/plan.png cannot be written: "),
    ],
)
def test_options_of_rubbish_end_with_2(lengths_csv, capsys, option, words):
    with pytest.raises(SystemExit) as ended:
        main(["plan", str(lengths_csv[0]), *option])
    assert ended.value.code == 2 and words in capsys.readouterr().err


def test_every_option_of_every_command_has_help():
    commands = typer.main.get_command(cli.app).commands
    assert {"train", "plan", "convert-config"} <= set(commands)
    for name, command in commands.items():
        assert command.help, name
        for parameter in command.params:
            assert getattr(parameter, "help", None), f"{name} {parameter.name}"


@pytest.mark.bad_input
def test_bad_binary_files(tmp_path):
    np.save(tmp_path / "float.npy", np.array([1.5, 2.0]))
    with pytest.raises(DataError, match="float.npy holds no column of integers"):
        read_lengths(tmp_path / "float.npy")
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="bytes.csv: no UTF-8 text from about line 1 on: invalid start byte"):
        read_lengths(tmp_path / "bytes.csv")
    parquet.write_table(pyarrow.table({"length": [1, None], "q": [1, 2]}), tmp_path / "gap.parquet")
    with pytest.raises(DataError, match="1 rows have no value in column 'length'"):
        read_lengths(tmp_path / "gap.parquet")
    parquet.write_table(pyarrow.table({"t": ["a"]}), tmp_path / "text.parquet")
    with pytest.raises(DataError, match="no integer column .columns: t."):
        read_lengths(tmp_path / "text.parquet")


def test_a_picture_of_no_known_format_is_refused_before_anything_is_planned(lengths_csv, tmp_path):
    result = CliRunner().invoke(app_of(plan), [str(lengths_csv[0]), "--plot", str(tmp_path / "x.txt")])
    assert isinstance(result.exception, ConfigError) and "has no suffix of an image format: use one of" in str(
        result.exception
    )


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
    assert printed["plot"] == str(picture)
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
    assert TABLE_ROWS[0][3] not in result.output and result.output.endswith("\n--explain tells what each row means\n")
    explained = CliRunner().invoke(app_of(plan), [str(lengths_csv[0]), "--compare", "--explain"])
    for label, _, _, meaning in TABLE_ROWS:
        assert f"\n{label}: {meaning}\n" in explained.output


def test_convert_config(tmp_path):
    source = tmp_path / "grpo.yaml"
    sections = {
        "sequence_packing": {"enabled": True, "train_mb_tokens": 2048, "sequence_length_round": 64},
        "dynamic_batching": {"enabled": False},
    }
    source.write_text(yaml.safe_dump({"policy": sections}))
    result = CliRunner().invoke(app_of(convert_config), [str(source)])
    assert result.exit_code == 0, result.output
    assert "#   policy.sequence_packing.sequence_length_round: NeMo-RL never reads it" in result.output
    worker = yaml.safe_load(result.output)["actor_train"]
    assert worker["sequence_packing_args"]["max_packed_sequence_length_train"] == 2048
    source.write_text("model: 7b\n")
    result = CliRunner().invoke(app_of(convert_config), [str(source)])
    assert isinstance(result.exception, ConfigError)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "policy: {sequence_packing: {enabled: true, train_mb_tokens: '${mul:2, x}'}}",
            "train_mb_tokens is 'xx'; write",
        ),
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


def test_plan_knows_expert_parallelism(lengths_csv):
    result = CliRunner().invoke(app_of(plan), [str(lengths_csv[0]), "--dp", "4", "--ep", "2", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["constraints"]["ep_size"] == 2


def test_plan_pads_packs_to_few_lengths(lengths_csv):
    said = CliRunner().invoke(app_of(plan), [str(lengths_csv[0]), "--pack-shapes", "4", "--compare", "--json"])
    assert said.exit_code == 0, said.output
    found = json.loads(said.stdout)
    assert found["constraints"]["pack_shapes"] == 4
    packed = found["reports"]["packed"]
    assert packed["computed_tokens"] % (found["constraints"]["max_tokens"] // 4) == 0
