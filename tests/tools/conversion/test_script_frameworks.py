"""The defaults of verl and slime that the converters write, against checkouts (VERL_CHECKOUT, SLIME_CHECKOUT)."""

from __future__ import annotations

import ast
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from roll_batching.tools.conversion.foreign_file import value_at
from roll_batching.tools.conversion.slime_command import SLIME
from roll_batching.tools.conversion.verl_file import defaults_of

pytestmark = pytest.mark.config


def checkout(name: str) -> Path:
    folder = os.environ.get(f"{name.upper()}_CHECKOUT")
    if not folder:
        pytest.skip(f"{name.upper()}_CHECKOUT names no checkout of {name}")
    return Path(folder)


def _number(value: Any) -> Any:
    """YAML reads 1e-3 as a text."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


@pytest.mark.parametrize("megatron", [True, False], ids=["megatron", "fsdp"])
def test_verls_rl_defaults_are_those_that_it_composes(megatron):
    folder = checkout("verl") / "verl" / "trainer" / "config"
    composed = yaml.safe_load((folder / f"_generated_ppo_{'megatron_' if megatron else ''}trainer.yaml").read_text())
    for key, ours in defaults_of(False, megatron).items():
        assert _number(value_at(composed, key)) == ours, key


@pytest.mark.parametrize("megatron", [True, False], ids=["megatron", "fsdp"])
def test_verls_sft_defaults_are_those_of_its_files(megatron):
    folder = checkout("verl") / "verl" / "trainer" / "config"
    engine = "megatron" if megatron else "fsdp"
    composed = yaml.safe_load((folder / "sft_trainer_engine.yaml").read_text())
    composed |= {part: yaml.safe_load((folder / part / f"{engine}.yaml").read_text()) for part in ("engine", "optim")}
    composed["model"] = yaml.safe_load((folder / "model" / "hf_model.yaml").read_text())
    for key, ours in defaults_of(True, megatron).items():
        assert _number(value_at(composed, key)) == ours, key


def _arguments(source: str) -> dict[str, dict[str, Any]]:
    """By option that a module adds to a parser, its literal keywords."""
    found: dict[str, dict[str, Any]] = {}
    for call in ast.walk(ast.parse(source)):
        if not isinstance(call, ast.Call):
            continue
        texts = [one.value for one in call.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
        words = {word.arg or "": ast.unparse(word.value) for word in call.keywords}
        found |= {text: words for text in texts if text.startswith("--")}
    return found


def test_slimes_defaults_and_types_are_those_of_its_parser():
    arguments = _arguments((checkout("slime") / "slime" / "utils" / "arguments.py").read_text())
    ours = SLIME.defaults("all_tasks", "rl")
    compared = {key for key in ours if key in arguments}
    assert len(compared) >= 20, compared
    for key in compared:
        words = arguments[key]
        theirs = ast.literal_eval(words["default"]) if "default" in words else False
        assert theirs == ours[key], key
    kinds = {
        "int": SLIME.of_type("counts", "integers"),
        "float": SLIME.of_type("floats"),
        "str": SLIME.of_type("texts"),
    }
    flags, lists = set(SLIME.of_type("flags")), set(SLIME.of_type("lists"))
    for key in {*kinds["int"], *kinds["float"], *kinds["str"], *flags, *lists} & arguments.keys():
        words = arguments[key]
        if "nargs" in words:
            assert key in lists, key
        elif "action" in words:
            assert key in flags, key
        else:
            assert key in kinds[words["type"]], key
