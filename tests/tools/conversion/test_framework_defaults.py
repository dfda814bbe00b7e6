"""Defaults of other frameworks: filled in where a file is silent, written out where they differ from ours."""

from __future__ import annotations

import json

import pytest

from roll_batching.tools.conversion.draft import Draft, check_draft
from roll_batching.tools.conversion.foreign_file import fill_defaults

DEFAULTS = {"seed": 42, "top.temperature": 0.95, "top.top_p": 0.7, "off.deep.value": 1, "gone": None}


@pytest.mark.config
def test_only_absent_keys_are_filled():
    data = {"top": {"temperature": 1.0}, "off": None}
    assert fill_defaults(data, DEFAULTS) == {"seed", "top.top_p", "gone"}
    assert data == {"seed": 42, "top": {"temperature": 1.0, "top_p": 0.7}, "off": None, "gone": None}
    assert fill_defaults(data, DEFAULTS) == set(), "once filled, nothing is absent"


@pytest.mark.config
def test_sections_that_are_made_are_filled_keys_too():
    data: dict[str, object] = {}
    assert {"off", "off.deep", "off.deep.value"} <= fill_defaults(data, DEFAULTS)
    shared = {"list": [1]}
    fill_defaults(data, {"list": shared["list"]})
    data["list"].append(2)  # type: ignore[attr-defined]
    assert shared == {"list": [1]}, "a default is not shared between files"


@pytest.mark.config
def test_defaults_that_differ_are_written_out_and_marked():
    draft = Draft("file.yaml", framework="Theirs")
    data = {"actor_train": {"training_args": {"learning_rate": 1e-6}}}
    learning = "actor_train.training_args"
    theirs = {f"{learning}.adam_beta1": 0.9, f"{learning}.weight_decay": 0.01, "norm_reward": True, "sharding": 3}
    draft.defaults = fill_defaults(data, theirs)
    draft.values = data
    draft.leave_out("norm_reward", "refused", "there is no such thing")
    del data["norm_reward"]
    done = check_draft(draft)
    assert done.settings == {"actor_train": {"training_args": {"learning_rate": 1e-6, "weight_decay": 0.01}}}
    assert [one.key for one in done.defaults] == [f"{learning}.weight_decay"]
    assert [one.key for one in done.kept] == [f"{learning}.learning_rate"]
    assert [(one.key, one.why) for one in done.left_out] == [
        ("norm_reward", "Theirs's default; there is no such thing")
    ], "a default without effect here is not mentioned, one that matters is"
    assert f"# Theirs's defaults, for keys that the file leaves out:\n#   {learning}.weight_decay\n" in done.to_yaml()
    assert json.loads(done.to_json())["defaults_of_the_framework"][0]["key"] == f"{learning}.weight_decay"
