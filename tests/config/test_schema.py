"""The schema is true: every honoured key is read, the reference page is current, nothing needs torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import roll_batching
from roll_batching.config import JobConfig, load_config
from roll_batching.config.fields import Honoured, Noticed, Refused, use_of
from roll_batching.config.key_paths import schema_keys
from roll_batching.config.reference import reference_page

ROOT = Path(__file__).parents[2]
PACKAGE = Path(roll_batching.__file__).parent
CHECKS_ONLY = {"fields.py", "validation.py", "notices.py", "reference.py", "rules.py", "key_paths.py"}
"""Files of config/ that look at keys without doing what they ask."""


def names_read():
    names = set()
    for file in PACKAGE.rglob("*.py"):
        if file.parent.name == "config" and file.name in CHECKS_ONLY:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute):
                names.add(node.attr)
    return names


def settings_keys():
    return {(key.owner, key.path[-1]): key for key in schema_keys()}.values()


def test_every_key_declares_its_use():
    for key in settings_keys():
        use = use_of(key.field)
        assert key.field.description, key.path
        if isinstance(use, Noticed):
            assert len(use.notice) > 10, key.path
        if isinstance(use, Refused):
            assert len(use.reason) > 8 and key.field.default in use.allowed, key.path


def test_every_honoured_key_is_read():
    read = names_read()
    unread = [
        ".".join(key.path)
        for key in settings_keys()
        if isinstance(use_of(key.field), Honoured) and key.path[-1] not in read and not only_refuses(key)
    ]
    assert unread == []


def only_refuses(key):
    """A section whose every key is refused holds nothing to read."""
    return key.section is not None and all(
        isinstance(use_of(field), Refused) for field in key.section.model_fields.values()
    )


def test_the_reference_page_is_current():
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    command = "python -m roll_batching.config.reference docs/configuration.md"
    assert page == reference_page(), f"run {command}"


def test_every_key_is_on_the_reference_page():
    page = reference_page()
    for key in settings_keys():
        assert f"| `{key.path[-1]}` |" in page


@pytest.mark.parametrize("file", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda file: file.stem)
def test_examples_load_and_can_run(file):
    config = load_config(file)
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
        "from roll_batching.config import load_config\n"
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
