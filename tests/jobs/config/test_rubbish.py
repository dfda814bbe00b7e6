"""Whatever stands in a file or an override: one message, exit code 2, bounded time and memory, no traceback."""

from __future__ import annotations

import contextlib
import copy
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import hypothesis
import pytest
import yaml
from hypothesis import strategies as st

from roll_batching.cli import main
from roll_batching.errors import ConfigError
from roll_batching.jobs.config import ConfigFileError, config_from_dict, load_config
from roll_batching.jobs.config.key_paths import heading_of, schema_keys

pytestmark = pytest.mark.bad_input

ROOT = Path(__file__).parents[3]
SECONDS = 10


def laughs(levels, of="{}"):
    """Each line an anchor for ten aliases of the line before."""
    lines = ["a0: &a0 [x]"] + [f"a{i}: &a{i} {of.format(', '.join([f'*a{i - 1}'] * 10))}" for i in range(1, levels)]
    return "\n".join(lines)


def chain(levels, template):
    return "".join(f"b{i}: {template.format(i + 1)}\n" for i in range(levels)) + f"b{levels}: x\n"


RUBBISH = {
    "billion laughs": (laughs(12, "[{}]"), "job.yaml:5: holds more than 20,000 values"),
    "billion merges": (laughs(12, "{{<<: [{}]}}").replace("[x]", "{x: 1}"), "once aliases"),
    "aliases of a long text": (
        f"a: &a {'x' * 100_000}\nactor_train: {{data_args: {{file_name: [{', '.join(['*a'] * 60)}]}}}}",
        "1,048,576 characters",
    ),
    "an alias of itself": ("a: &a [*a]", "job.yaml:1: an anchor's value holds an alias of itself"),
    "a merge of itself": ("a: &a\n  <<: *a", "holds an alias of itself"),
    "a merge of a number": ("a: &a 3\nb:\n  <<: *a", "job.yaml:3: b: `<<` takes an alias of a section"),
    "doubling references": (chain(40, '"${{b{0}}}${{b{0}}}"'), "once references (${name}) are expanded"),
    "references to lists": (chain(20, "[" + ", ".join(['"${{b{0}}}"'] * 10) + "]"), "once references"),
    "references to themselves": ("a: ${b}\nb: ${a}", "job.yaml:1: a: ${b} refers to itself through b -> a -> b"),
    "a section in itself": ("a: {b: '${a}'}", "refers to itself through a -> a"),
    "a long chain of references": (chain(100, "${{b{0}}}"), "is reached through more than 32 references"),
    "many references to many": (
        "".join(f"c{i}: {''.join(f'${{c{j}}}' for j in range(15) if j != i)}\n" for i in range(15)),
        "c0: ${c1} refers to itself through c1 -> c0 -> c1",
    ),
    "a section in a text": ("warmup: {}\nexp_name: x${warmup}", "job.yaml:2: exp_name: ${warmup} is a section"),
    "deep lists": ("a: " + "[" * 5000, "job.yaml:1: more than 32 sections or lists inside each other"),
    "deep sections": ("\n".join(" " * i + "a:" for i in range(400)), "job.yaml:32: more than 32 sections"),
    "deep dashes": ("a:\n" + "- " * 5000, "more than 32 sections"),
    "NUL": ("a: 1\nb: \0", "job.yaml:2: is not valid YAML: the character U+0000 cannot stand in it"),
    "an escaped NUL": ('exp_name: "a\\0b"', "job.yaml:1: exp_name: holds a NUL character"),
    "half a surrogate": ('exp_name: "\\ud800"', "exp_name: holds half of a surrogate pair"),
    "an escape beyond Unicode": ('exp_name: "\\UFFFFFFFF"', "is not valid YAML"),
    "no number": ("seed: !!int abc", "job.yaml:1: seed: 'abc' cannot be read as int"),
    "an empty number": ("seed: !!int ''", "seed: '' cannot be read as int"),
    "no boolean": ("seed: !!bool abc", "seed: 'abc' cannot be read as bool"),
    "no date": ("seed: !!timestamp abc", "seed: 'abc' cannot be read as timestamp"),
    "a date": ("exp_name: 2026-01-02", "exp_name: 2026-01-02 is read as a date; put it into quotes"),
    "a date that is none": ("exp_name: 2026-13-41", "exp_name: '2026-13-41' cannot be read as timestamp"),
    "a binary": ("exp_name: !!binary aGk=", "the tag 'tag:yaml.org,2002:binary' is not read; remove it"),
    "a set": ("actor_train: !!set {a, b}", "the tag 'tag:yaml.org,2002:set' is not read"),
    "an object": ("actor_train: !!python/object:os.system {a: b}", "python/object:os.system' is not read"),
    "a tagged list": ("exp_name: !x [1]", "the tag '!x' is not read"),
    "a list as a key": ("[1, 2]: 3", "job.yaml:1: a key must be plain text"),
    "a number as a key": ("1: 3", "job.yaml:1: 1: unknown key"),
    "an empty key": ("'': 3", "job.yaml:1: '': unknown key"),
    "a key of escapes": ('"\\e[31mred": 3', "\\x1b[31mred: unknown key"),
    "a key twice": ("seed: 1\nseed: 2", "job.yaml:2: seed: is written 2 times"),
    "a huge number": ("seed: " + "9" * 5000, "seed: '9999"),
    "a number beyond 64 bits": ("seed: 9223372036854775808", "seed: is a whole number beyond 64 bits"),
    "a number of 2^62": ("rollout_batch_size: 4611686018427387904\nmax_stepz: 1", "max_stepz"),
    "infinity": ("actor_train: {training_args: {learning_rate: .inf}}", "expected a finite number, got inf"),
    "infinity by exponent": ("kl_loss_coef: 1e999", "kl_loss_coef: expected a finite number"),
    "two documents": ("seed: 1\n---\nseed: 2", "job.yaml:2: is not valid YAML: expected a single document"),
    "a directive": ("%YAML " + "9" * 5000 + ".1\n---\nseed: 1", "is not valid YAML"),
    "a list": ("- a", "the file must hold keys and values"),
    "a word": ("hello", "the file must hold keys and values"),
    "an undefined alias": ("a: *b", "found undefined alias"),
    "a tab": ("a:\n\t- b", "job.yaml:2: is not valid YAML"),
    "UTF-16": ("seed: 1\n".encode("utf-16"), "job.yaml: is not UTF-8 text (byte 0: invalid start byte)"),
    "latin-1": ("exp_name: f\xfcr".encode("latin-1"), "is not UTF-8 text (byte 11"),
    "bytes": (bytes(range(128, 256)), "is not UTF-8 text"),
    "a large file": ("# " + "x" * 300_000, "more than the limit of 262,144"),
    "a huge file": (2**30, "job.yaml: has 1,073,741,824 bytes"),
    "many unknown keys": ("".join(f"k{i}zq: 1\n" for i in range(9000)), "has 9,000 problems"),
    "many devices": ("actor_train: {device_mapping: 0-99999999999}", "names more than 65,536 devices"),
    "a range of devices": ("actor_train: {device_mapping: range(10000000000)}", "names more than 65,536 devices"),
    "beyond a range": (f"actor_train: {{device_mapping: 0-{'9' * 100}}}", "names more than 65,536 devices"),
    "nested devices": (f"actor_train: {{device_mapping: '{'list(' * 150}{')' * 150}'}}", "cannot read 'list("),
    "a sum of devices": (f"actor_train: {{device_mapping: '{'+'.join(['1'] * 9000)}'}}", "write ranges"),
    "a list of devices": (
        f"actor_train: {{device_mapping: {[*range(15_000), 0]}}}",
        "actor_train.device_mapping: device 0 is named twice",
    ),
}

OVERRIDES = {
    "laughs": ("a={a0: &a0 [x], " + laughs(9, "[{}]").replace("\n", ", ").partition(", ")[2] + "}", "20,000 values"),
    "itself": ("a=&a [*a]", "its value an anchor's value holds an alias of itself"),
    "deep": ("a=" + "[" * 5000, "more than 32 sections"),
    "a deep path": (".".join(["a"] * 5000) + "=1", "a path of 5000 keys"),
    "no number": ("seed=!!int abc", "'abc' cannot be read as int"),
    "half": ("actor_train={", "is not valid YAML"),
    "two documents": ("seed=1\n---\n2", "expected a single document"),
    "an escaped NUL": ('exp_name="\\0"', "holds a NUL character"),
    "broken bytes": ("exp_name=\udcff", "U+DCFF"),
    "a broken key": ("\udcff=1", "half of a surrogate pair"),
    "references": ("exp_name=${exp_name}", "refers to itself"),
    "an item of digits": ("actor_train.device_mapping.²=1", "is not one"),
    "a large item": (f"actor_train.device_mapping.{'9' * 5000}=1", "is not one"),
    "a long text": ("seed=" + "x" * 100_000, "expected a whole number, got 'xxx"),
    "devices": ("reference.device_mapping=0-99999999999", "names more than 65,536 devices"),
    "no key": ("=1", "an override is written path.to.key=value"),
}


def complaint(file, overrides=()):
    start = time.perf_counter()
    with pytest.raises(ConfigFileError) as caught:
        load_config(file, overrides)
    assert time.perf_counter() - start < SECONDS
    message = str(caught.value)
    assert message.isprintable() or message.replace("\n", "").isprintable()
    assert len(message) < 20_000 and "Traceback" not in message
    return message


def write(path, content):
    if isinstance(content, int):
        with path.open("wb") as stream:
            stream.truncate(content)
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize("name", RUBBISH)
def test_a_file_of_rubbish_is_one_error(tmp_path, name, report):
    content, words = RUBBISH[name]
    message = complaint(write(tmp_path / "job.yaml", content)).replace(str(tmp_path) + "/", "")
    assert words in message
    report(f"{name}: {message.splitlines()[1].strip()[:150]}")


@pytest.mark.parametrize("name", OVERRIDES)
def test_an_override_of_rubbish_is_one_error(name):
    override, words = OVERRIDES[name]
    assert words in complaint(ROOT / "configs" / "demo_grpo.yaml", ["actor_train.device_mapping=[0, 1]", override])


@pytest.mark.parametrize("kind", ["folder", "pipe", "device", "unreadable name"])
def test_what_is_no_file_is_said_and_never_waited_for(tmp_path, kind):
    path = tmp_path / "job.yaml"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path = Path("/dev/zero")
    else:
        path = tmp_path / ("x" * 5000)
    assert "is a folder or a device" in complaint(path) or "File name too long" in complaint(path)


@pytest.mark.parametrize("command", ["train", "convert-config"])
def test_the_command_ends_with_2_and_one_message(tmp_path, command):
    file = write(tmp_path / "job.yaml", RUBBISH["billion laughs"][0])
    arguments = [command, "--config", str(file)] if command == "train" else [command, str(file)]
    limit = 2 * 2**30
    done = subprocess.run(
        [sys.executable, "-m", "roll_batching.cli", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )
    assert done.returncode == 2 and done.stderr.startswith("error: ") and "Traceback" not in done.stderr
    assert done.stderr.count("error: ") == 1 and "20,000 values" in done.stderr and not done.stdout


@pytest.mark.parametrize(
    "content",
    [b"", b"# nothing\n", b"\xef\xbb\xbfseed: 3\n", b"a: &a {seed: 3}\n<<: *a\n", b"seed: 3\r\n...\n"],
    ids=["empty", "comment", "BOM", "merge", "CRLF"],
)
def test_odd_files_that_are_right(tmp_path, content):
    if b"&a" in content:
        content = b"actor_train: &a {infer_batch_size: 3}\nreference:\n  <<: *a\n  device_mapping: ~\nseed: 3\n"
    config = load_config(write(tmp_path / "job.yaml", content))
    assert config.seed == (3 if b"seed" in content else 42)
    assert b"<<" not in content or config.reference.infer_batch_size == 3


def test_an_alias_of_a_section_that_overrules_what_it_merges_is_no_key_twice(tmp_path):
    text = "x: &x {infer_batch_size: 1, seed: 1}\ny: &y {<<: *x, seed: 2}\nz: *y\nw: *y\n"
    message = complaint(write(tmp_path / "job.yaml", text))
    assert "written" not in message and message.count("unknown key") == 4


@pytest.mark.parametrize("path", [(), ("actor_train",), ("warmup", "training_args"), ("reference", "model_args")])
def test_an_unknown_key_without_a_near_one_names_the_place_that_lists_them(tmp_path, path):
    settings = {"qqqqqqq": 1}
    for part in reversed(path):
        settings = {part: settings}
    message = complaint(write(tmp_path / "job.yaml", yaml.safe_dump(settings)))
    assert f"unknown key; all keys of this section: docs/configuration.md, {heading_of(path)!r}" in message
    assert message.count("docs/configuration.md") == 1 and len(message) < 500


def test_the_reference_page_has_those_headings():
    page = (ROOT / "docs" / "configuration.md").read_text()
    sections = {key.path for key in schema_keys() if key.section is not None} | {()}
    for path in sections:
        heading = heading_of(path)
        assert f"# {heading}\n" in page or f"# `{heading}`\n" in page, path


@pytest.mark.parametrize("value", [2**62, 1e300, [[1]], "x" * 1000], ids=["2^62", "1e300", "list", "text"])
def test_no_value_of_any_key_ends_in_a_traceback_or_takes_long(value):
    base = yaml.safe_load((ROOT / "configs" / "demo_grpo.yaml").read_text())
    keys = {(key.owner, key.path[-1]): key for key in schema_keys()}.values()
    for key in keys:
        settings = copy.deepcopy(base)
        here = settings
        for part in key.path[:-1]:
            here = here.setdefault(part, {})
        here[key.path[-1]] = value
        start = time.perf_counter()
        with contextlib.suppress(ConfigError):
            config_from_dict(settings).check_runnable()
        assert time.perf_counter() - start < SECONDS, key.path


def cyclic(value):
    value["actor_train"]["system_envs"] = value
    return value


def cyclic_list():
    items = [1]
    items.append(items)
    return items


def laughing(levels):
    items = ["x"]
    for _ in range(levels):
        items = [items] * 10
    return items


def nested(levels):
    value = {}
    for _ in range(levels):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (cyclic({"actor_train": {}}), "is a section or a list inside itself"),
        ({"reward_args": {"x": cyclic_list()}}, "reward_args.x.1: is a section or a list inside itself"),
        ({"reward_args": {"x": laughing(6)}}, "reward_args: holds more than 20,000 values"),
        ({"reward_args": nested(5000)}, "reward_args: more than 32 sections or lists inside each other"),
        ({"reward_args": (cyclic_list(),)}, "reward_args.0.1: is a section"),
    ],
)
def test_python_objects_that_no_file_could_hold_are_one_error(settings, words):
    with pytest.raises(ConfigFileError) as caught:
        config_from_dict(settings)
    assert words in str(caught.value)


def test_settings_at_hand_are_copied():
    mine = {"reward_args": {"words": ["a"]}}
    config = config_from_dict(mine)
    mine["reward_args"]["words"].append("b")
    assert config.reward_args == {"words": ["a"]}


WORDS = [key.path[-1] for key in schema_keys()]
ATOMS = st.sampled_from(
    [*WORDS[:: max(1, len(WORDS) // 40)], "&a", "*a", "<<", "!!int", "!x", "${a}", "${seed}", "1e9", "~", "- ", ": "]
    + ["\n", "\n  ", "\n    ", "{", "}", "[", "]", ", ", "'", '"', "|", ">", "#", "%", "---\n", "\t", "\0", "\ufeff"]
)
TEXTS = st.lists(st.one_of(ATOMS, st.text(max_size=8)), max_size=40).map("".join)


@hypothesis.given(TEXTS, st.lists(TEXTS, max_size=2))
@hypothesis.settings(max_examples=120, suppress_health_check=list(hypothesis.HealthCheck))
def test_random_text_only_ever_raises_a_configuration_error(tmp_path_factory, text, overrides):
    file = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    with contextlib.suppress(ConfigError):
        load_config(file, overrides).check_runnable()


def test_main_says_it_once(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["train", "--config", str(write(tmp_path / "job.yaml", RUBBISH["UTF-16"][0]))])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.count("UTF-8") == 2 and said.count("error:") == 1
