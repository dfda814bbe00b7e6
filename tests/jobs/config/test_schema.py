"""The schema is true: every key is read, the reference page is current, nothing needs torch."""

from __future__ import annotations

import ast
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

import roll_batching
from roll_batching.jobs.config import ConfigFileError, JobConfig, load_config
from roll_batching.jobs.config.foreign_keys import (
    FOREIGN_KEYS,
    FRAMEWORK_OF,
    Verdict,
    foreign_paths,
    given_foreign_keys,
)
from roll_batching.jobs.config.key_paths import schema_keys
from roll_batching.jobs.config.reference import reference_page
from roll_batching.settings.fields import Settings, scope_of, setting
from tests.huggingface.published import PUBLISHED
from tests.jobs.config.typed_reads import Package

ROOT = Path(__file__).parents[3]
PACKAGE = Path(roll_batching.__file__).parent
CHECKS = {
    ("jobs/config/rules.py", "broken_rules"),
    ("jobs/config/rules.py", "missing_for_a_run"),
    ("jobs/config/notices.py", "collect_notices"),
}
"""They look at keys without doing what these ask."""

DECIDED_BY_RULES = {("StrategyArgs", "strategy_name")}
"""Every role runs on the one strategy that it can run on; rules and notices say which names it may give."""
SHORT_FORMS = {("JobKeys", "pretrain"), ("ModelArgs", "vision_encoder")}
"""Read before settings are made: the first is written where it belongs (`tests/huggingface/test_job.py`), the second
decides the architecture that a model directory gives (`tests/huggingface/test_vision_config.py`)."""


def reads_of(package):
    """What `package` reads outside of config, when settings are made, and in whatever is called from there."""
    found = set()
    for file, owner, function in package.places:
        validates = any("validator" in ast.unparse(decorator) for decorator in function.decorator_list)
        if validates or not file.startswith(("jobs/config/", "settings/")):
            found |= package.reads(file, owner, function)
    left = list(found)
    while left:
        place, name = read = left.pop()
        if read in CHECKS:
            continue
        if place in package.classes:
            files = [(f, m) for f, owner, m in package.places if owner == place and m.name == name]
            new = {inner for file, method in files for inner in package.reads(file, place, method)}
        else:
            new = package.reads(place, None, package.functions[read])
        left += new - found
        found |= new
    return found


def settings_keys():
    return {(key.owner, key.path[-1]): key for key in schema_keys()}.values()


def test_every_key_has_a_help_text_and_a_scope():
    for key in settings_keys():
        assert key.field.description and scope_of(key.field), key.path


FOREIGN = [(section, key) for section, keys in FOREIGN_KEYS.items() for key in keys.values()]


@pytest.mark.parametrize(("section", "key"), FOREIGN, ids=lambda one: getattr(one, "name", None) or one.__name__)
def test_a_foreign_key_has_a_reason_and_is_not_in_the_schema(section, key):
    assert len(key.reason) > 8 and key.name not in section.model_fields
    assert not key.allowed or key.verdict is Verdict.REFUSED
    assert not key.refuses(None) and not any(map(key.refuses, key.allowed))
    instead = tuple(key.instead.partition(":")[0].split(".")) if key.instead else ()
    assert any(path.path[-len(instead) :] == instead for path in schema_keys()) or not instead, key.instead


def test_foreign_keys_are_one_table_beside_the_schema(report):
    assert len(FOREIGN) == sum(map(len, FOREIGN_KEYS.values())) and FOREIGN_KEYS.keys() == FRAMEWORK_OF.keys()
    report(f"{len(list(schema_keys()))} paths in the schema, {len(foreign_paths())} of {len(FOREIGN)} foreign keys")


def test_options_of_an_engine_are_not_foreign_keys():
    """Their names are those of the engine's command line, whatever Megatron calls so."""
    options = {"moe_grouped_gemm": True, "fp8_param": "x"}
    engine = {"strategy_args": {"strategy_name": "vllm", "strategy_config": options}}
    assert not list(given_foreign_keys({"actor_infer": engine}))
    assert len(list(given_foreign_keys({"actor_train": engine["strategy_args"]}))) == 0
    megatron = {"strategy_args": {"strategy_config": options}}
    assert [given.key.name for given in given_foreign_keys({"actor_train": megatron})] == list(options)


def declaring(settings, name):
    """The class among `settings` and its bases that has the field `name`."""
    return next(base.__name__ for base in settings.__mro__ if name in inspect.get_annotations(base))


def unread(keys, read):
    return {(declaring(key.owner, key.path[-1]), key.path[-1]) for key in keys} - read


def test_every_key_is_read(report):
    keys = settings_keys()
    assert len({settings.__name__ for settings in {key.owner for key in keys}}) == len({key.owner for key in keys})
    assert unread(keys, reads_of(Package(PACKAGE)) | DECIDED_BY_RULES | SHORT_FORMS) == set(), (
        "nothing reads these; or what reads them does so through a variable of unclear type: annotate it"
    )
    report(f"{len(keys)} keys: each is read from its own section")


def test_an_attribute_of_the_same_name_elsewhere_does_not_read_a_key(tmp_path):
    """The pilot's speed, and a setting called speed that a property takes up and nobody asks for."""

    class Engine(Settings):
        speed: int = setting(1, help="Read by nobody.")
        power: int = setting(1, help="Read through a property.")
        fuel: int = setting(1, help="Read from a copy of the section, in a loop.")

    (tmp_path / "settings").mkdir()
    (tmp_path / "settings" / "engine.py").write_text(
        "class Engine:\n    speed: int\n    power: int\n    fuel: int\n"
        "    @property\n    def idle(self) -> int:\n        return self.speed\n"
        "    @property\n    def strength(self) -> int:\n        return self.power\n"
    )
    (tmp_path / "pilot.py").write_text(
        "class Pilot:\n    speed: int\n    engines: dict[str, Engine]\n"
        "    def fly(self, engine: Engine, other):\n"
        "        strength = engine.strength + self.speed + other.speed\n"
        "        for name, one in self.engines.items():\n            strength += one.model_copy().fuel\n"
        "        return strength\n"
    )
    assert unread(list(schema_keys(Engine)), reads_of(Package(tmp_path))) == {("Engine", "speed")}


def test_the_reference_page_is_current():
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    command = "python -m roll_batching.jobs.config.reference docs/configuration.md"
    assert page == reference_page(), f"run {command}"


def test_every_key_is_on_the_reference_page():
    page = reference_page()
    for name in [*(key.path[-1] for key in settings_keys()), *(key.name for _, key in FOREIGN)]:
        assert f"| `{name}` |" in page


@pytest.mark.parametrize("file", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda file: file.stem)
def test_examples_load_and_can_run(file, tmp_path):
    config = load_config(file)
    if config.pretrain is not None:
        with pytest.raises(ConfigFileError, match="download the model first"):
            load_config(file, ["pretrain=Some/Model"]).check_runnable()
        assert config.pretrain in ("Qwen/Qwen2.5-7B", "data/hf_model/tiny-qwen3")
        (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["Qwen2.5-7B"]))
        config = load_config(file, [f"pretrain={tmp_path}"])
    config.check_runnable()
    config.actor_train.batching()
    assert config.notices == ()
    assert config.mini_batch_size(config.dp_size(config.world_size)) <= config.rollout_batch_size * config.group_size


def test_the_examples_cover_packing_and_dynamic_batching():
    modes = {
        name: load_config(ROOT / "configs" / f"{name}.yaml").actor_train.batching().train.mode
        for name in (
            "demo_grpo",
            "demo_grpo_dynamic",
            "demo_grpo_padded",
            "h100_sequence_packing",
            "h100_dynamic_batching",
        )
    }
    assert list(modes.values()) == ["packed", "dynamic", "padded", "packed", "dynamic"]


def test_configurations_load_without_torch():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from roll_batching.jobs.config import load_config\n"
        "from roll_batching.planning import ParallelDims, PlanConstraints\n"
        "config = load_config('configs/demo_grpo.yaml')\n"
        "PlanConstraints.of(ParallelDims(dp_size=2), config.actor_train.batching().train)\n"
        "import roll_batching.cli\n"
        "print(config.world_size)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "2"), done.stderr


def test_settings_are_frozen():
    from pydantic import ValidationError

    with pytest.raises(ValidationError):
        JobConfig().seed = 3
