"""The JSON schema of job files accepts what the loader accepts, and knows the same keys."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import os
import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import hypothesis
import pydantic
import pytest
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from roll_batching.jobs.config import ConfigFileError, config_from_dict, load_config
from roll_batching.jobs.config.foreign_keys import FOREIGN_KEYS, Verdict, foreign_paths
from roll_batching.jobs.config.job_keys import JobKeys
from roll_batching.jobs.config.json_schema import build_job_schema
from roll_batching.jobs.config.key_paths import ANY_NAME, all_keys
from roll_batching.settings.yaml_values import YamlFaults, read_values
from tests.jobs.config.jobs import BASE, changed
from tests.support.tiny_job import with_changes

pytestmark = pytest.mark.config

ROOT = Path(__file__).parents[3]
SCHEMA_FILE = ROOT / "docs" / "job.schema.json"
OURS = [*sorted((ROOT / "configs").glob("*.yaml")), *sorted((ROOT / "examples").rglob("*.yaml"))]
OURS.remove(ROOT / "examples" / "kuberay" / "rayjob.yaml")  # Ray's job
ROLLS = sorted((Path(__file__).parent / "data").glob("roll_*.yaml"))
SCHEMA = build_job_schema()
VALIDATOR = Draft202012Validator(SCHEMA)


def named(path):
    return str(path.relative_to(ROOT))


def values_of(file):
    return read_values(file.read_text())[0]


def problems_of(data):
    return [f"{error.json_path}: {error.message[:200]}" for error in VALIDATOR.iter_errors(data)]


def sections(schema=SCHEMA, path=()):
    """Every key of the schema by its path, with its schema."""
    for part in (schema, schema.get("then", {})):
        for name, inner in part.get("properties", {}).items():
            yield (*path, name), inner
            yield from below(inner, (*path, name))


def below(value, path):
    reference = value.get("$ref", "").rpartition("/")[2]
    if reference not in ("", "Reference"):
        yield from sections(SCHEMA["$defs"][reference], path)
    for option in (*value.get("anyOf", ()), *value.get("allOf", ())):
        yield from below(option, path)
    if "items" in value:
        yield from below(value["items"], path)
    if isinstance(value.get("additionalProperties"), dict):
        yield from below(value["additionalProperties"], (*path, ANY_NAME))


def test_it_is_a_valid_schema():
    Draft202012Validator.check_schema(SCHEMA)


def test_the_loader_and_the_schema_know_the_same_keys(report):
    known = {key.path for key in all_keys()} | set(foreign_paths())
    assert {path for path, _ in sections()} == known
    report(f"{len(known)} paths of keys")


def test_help_and_defaults_are_those_of_the_fields():
    values = dict(sections())
    for key in all_keys():
        value = values[key.path]
        assert value["description"] == key.field.description, key.path
        if key.field.default_factory is None and not key.field.is_required():
            assert value["default"] == json.loads(json.dumps(key.field.default)), key.path


@pytest.mark.parametrize("file", [*OURS, *ROLLS], ids=named)
def test_files_of_jobs_are_valid(file):
    assert problems_of(values_of(file)) == []


def test_settings_on_pages_are_valid(report):
    """Parts of jobs, indented or fenced."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").rglob("*.md")]
    count = 0
    for page in pages:
        text = page.read_text()
        blocks = [textwrap.dedent(block) for block in re.findall(r"(?:^ {4}.*\n|^\n)+", text, re.MULTILINE)]
        blocks += re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
        tables = [tomllib.loads(block) for block in re.findall(r"```toml\n(.*?)```", text, re.DOTALL)]
        for block in blocks:
            with contextlib.suppress(YamlFaults):
                tables.append(read_values(block)[0])
        for data in tables:
            if isinstance(data, dict) and data.keys() & SCHEMA["properties"].keys():
                assert problems_of(data) == [], page
                count += 1
    assert count > 30
    report(f"{count} examples on pages")


@pytest.mark.parametrize("file", [*(file for file in OURS if file.parent.name == "configs"), *ROLLS], ids=named)
def test_resolved_settings_are_valid(file):
    """A run writes them to config.yaml, which can be run again."""
    assert problems_of(load_config(file).to_dict()) == []


@pytest.mark.parametrize("file", OURS, ids=named)
def test_files_of_jobs_name_the_schema(file):
    start, _, path = file.read_text().splitlines()[0].partition("$schema=")
    assert start == "# yaml-language-server: " and (file.parent / path).resolve() == SCHEMA_FILE


def run(*, seed):
    command = [sys.executable, "-m", "roll_batching", "schema"]
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout


def test_the_command_prints_the_same_schema_every_time():
    assert json.loads(run(seed="1")) == SCHEMA
    assert run(seed="1") == run(seed="2")


@pytest.mark.skipif(
    f"pydantic=={pydantic.VERSION}" not in (ROOT / "constraints.txt").read_text(),
    reason="versions of pydantic spell the same rules differently",
)
def test_the_file_of_the_site_is_current():
    assert SCHEMA_FILE.read_text() == run(seed="1"), "run roll-batching schema > docs/job.schema.json"


# ---- wrong files

TRAIN, LAYOUT = "actor_train", "actor_train.strategy_args.strategy_config"
WRONG = {
    "max_stepz": 3,
    "actor_trian": {},
    f"{TRAIN}.use_sequence_paking": True,
    f"{TRAIN}.training_args.learning_rte": 1e-5,
    f"{TRAIN}.model_args.architecture.hiden_size": 64,
    f"{TRAIN}.model_args.architecture.moe.num_expert": 4,
    f"{TRAIN}.strategy_args.strategy_confg": {},
    f"{LAYOUT}.tensor_parallel_size": 2,
    f"{LAYOUT}.cluster.matmul_rat": 1e12,
    "rewards.sums.reward_funktion": "final_answer",
    "train.train_policy.load_balanced_pool": 3,
    "warmup.training_args.warm_up_steps": 3,
    "seed": "one",
    "max_steps": 3.5,
    "max_grad_norm": True,
    "adv_estimator": "grop",
    "eval_steps": -1,
    "exp_name": 7,
    f"{TRAIN}.use_sequence_packing": "packed",
    f"{TRAIN}.sequence_packing_args.algorithm": "load_balanse",
    f"{TRAIN}.device_mapping": ["0"],
    f"{TRAIN}.training_args.lr_scheduler_type": "cosin",
    f"{TRAIN}.data_args.file_name": {"a": "b"},
    f"{TRAIN}.model_args.architecture.window_layers": [0, 2],
    f"{LAYOUT}.exp_avg_dtype": "float8",
    f"{LAYOUT}.context_parallel_size": "automatic",
    f"{TRAIN}.strategy_args.strategy_name": "megatron",
    "actor_infer.strategy_args": {"strategy_name": "vllm", "strategy_config": [1]},
    "actor_infer.generating_args.top_k": -2,
    "actor_infer.generating_args.stop_strings": ["x"],
    "reward_args": ["x"],
    "tokenizer": None,
}
"""Misspelt keys and values of another type."""


@pytest.mark.bad_input
@pytest.mark.parametrize("key", WRONG)
def test_misspelt_keys_and_mistyped_values_are_refused(key):
    assert problems_of(BASE) == []
    data = changed({key: WRONG[key]})
    assert problems_of(data), f"{key} is accepted"
    with pytest.raises(ConfigFileError):
        config_from_dict(data)


KEYS = sorted((key.path for key in all_keys() if ANY_NAME not in key.path), key=str)


@pytest.mark.bad_input
@hypothesis.given(st.sampled_from(KEYS), st.data())
def test_a_key_with_another_letter_is_refused(path, data):
    *parents, name = path
    place = data.draw(st.integers(0, len(name) - 1))
    letter = data.draw(st.sampled_from("aeiotx_"))
    misspelt = name[:place] + letter + name[place + 1 :]
    known = {key[-1] for key in [*KEYS, *foreign_paths()] if list(key[:-1]) == parents}
    hypothesis.assume(misspelt not in known)
    assert problems_of(with_changes({}, {"/".join([*parents, misspelt]): None}, separator="/"))


# ---- right files

RIGHT = {
    f"{TRAIN}.device_mapping": ["list(range(0,8))", "0-7", [0, 1], 3, None, "list(range(0,${num_nodes}))"],
    f"{TRAIN}.training_args": [None, "${warmup.training_args}"],
    f"{TRAIN}.system_envs": [None, {"A": 1, "B": "x"}],
    f"{TRAIN}.model_args.dtype": [None, "bf16", "${precision}", "${kind}16"],
    f"{TRAIN}.model_args.lora_target": ["q_proj, k_proj", ["all-linear"], None],
    f"{TRAIN}.router_replay.mode": ["disable", "R2"],
    f"{LAYOUT}.recompute_modules": ["core_attn, moe", ["mlp"], None],
    f"{LAYOUT}.exp_avg_dtype": ["torch.bfloat16", "float32", "fp8"],
    f"{LAYOUT}.pipeline_model_parallel_layout": ["Et|tL", [["embedding"], ["${layer}"]]],
    "actor_train": [None],
    "actor_infer": [{"strategy_args": {"strategy_name": "vllm", "strategy_config": {"any_option": [1]}}}],
    "actor_infer.generating_args.top_k": [-1, 0, 5],
    "actor_infer.generating_args.num_beams": [1, None],
    "reference": [None, "${actor_train}"],
    "train": [{"train_policy": None}],
    "reward_function": ["my.module:reward", "final_answer", None],
    "reward_args": [{"any": {"thing": [1]}}],
    "rollout_args": [{"any": 1}],
    "loss_args": [{"any": "${seed}"}],
    "hydra": [{"run": {"dir": "."}}, None],
}
"""Forms that the loader reads, of which some are not the field's type."""


@pytest.mark.parametrize("key", RIGHT)
def test_other_forms_of_values_are_accepted(key):
    for value in RIGHT[key]:
        assert problems_of(with_changes({}, {key: value}, separator=".")) == [], value


@pytest.mark.parametrize("file", [ROOT / "configs" / "ppo_demo.yaml", *ROLLS], ids=named)
def test_any_value_may_be_a_reference(file):
    def replaced(data, path):
        data = copy.deepcopy(data)
        *parents, last = path
        functools.reduce(lambda section, part: section[part], parents, data)[last] = "${path.to.key}"
        return data

    def paths(data, path=()):
        for key, value in data.items() if isinstance(data, dict) else enumerate(data):
            yield (*path, key)
            if isinstance(value, dict | list):
                yield from paths(value, (*path, key))

    for path in paths(values_of(file)):
        assert problems_of(replaced(values_of(file), path)) == [], path


def test_foreign_keys_have_the_values_that_the_loader_accepts():
    for path in foreign_paths():
        section = next((key.section for key in all_keys() if key.path == path[:-1]), JobKeys)
        key = FOREIGN_KEYS[section][path[-1]]
        for value in [None, *key.allowed, True, 7, "word", [1], {"a": 1}]:
            data = with_changes({}, {"/".join(path): value}, separator="/")
            assert (problems_of(data) == []) is not key.refuses(value), (path, value)
        assert key.verdict is Verdict.REFUSED or not key.refuses("word")


# ---- every key

PROBES = [None, True, False, 0, 1, 2, -1, 0.5, "word", "a:b", "auto", [], [1], ["x"], [[1]], {}, {"k": 1}, {"k": "x"}]


def validator_of(settings):
    """The schema of a section alone."""
    if settings is JobKeys:
        return VALIDATOR
    return Draft202012Validator({"$ref": f"#/$defs/{settings.__name__}", "$defs": SCHEMA["$defs"]})


def kinds_of_errors(settings, name, value):
    try:
        settings.model_validate({name: value})
    except pydantic.ValidationError as error:
        errors = [item for item in error.errors() if item["loc"][:1] == (name,)]
        return {item["type"] for item in errors if item["type"] != "missing" or isinstance(item["loc"][-1], int)}
    return set()


def test_a_value_of_any_key_is_judged_as_by_the_loader(report):
    """Except where a validator judges its meaning, and for 0 and 1 as booleans: the loader takes them alone."""
    keys = {(key.owner, key.path[-1]): key for key in all_keys()}
    stricter = 0
    for settings, name in keys:
        valid = validator_of(settings)
        for value in PROBES:
            kinds, accepted = kinds_of_errors(settings, name, value), valid.is_valid({name: value})
            if accepted:
                assert kinds <= {"value_error"}, (settings, name, value, kinds)
            elif not kinds:
                assert value in (0, 1), (settings, name, value)
                stricter += 1
    report(f"{len(keys)} keys, {len(PROBES)} values of each; {stricter} of 0, 1, true, false refused here alone")
