"""Paths that version 0.2.0 moved: their new ones exist, and an old one in a configuration is told its new one."""

from __future__ import annotations

import importlib

import pytest

from roll_batching.errors import ConfigError
from roll_batching.moved import MOVED, moved_to
from roll_batching.registry import load_dotted


@pytest.mark.parametrize("old", MOVED)
def test_the_new_path_exists_and_the_old_one_does_not(old):
    importlib.import_module(MOVED[old])
    try:
        left = importlib.import_module(old)
    except ModuleNotFoundError:
        return
    assert left.__file__ is None, "at most a folder of caches that git left behind"


@pytest.mark.bad_input
def test_an_old_path_in_a_configuration_is_told_its_new_one():
    with pytest.raises(ConfigError, match=r"write roll_batching\.jobs\.rewards:final_answer$"):
        load_dotted("reward function", "roll_batching.rl.rewards:final_answer")
    assert callable(load_dotted("reward function", "roll_batching.jobs.rewards:final_answer"))
    assert moved_to("roll_batching.planning") is None and moved_to("roll_batching.rlx") is None
