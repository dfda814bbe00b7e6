"""The chapter for people who come from cosmos-rl: its code runs, its file loads, and it maps every documented key."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from roll_batching.jobs.config import load_config
from roll_batching.jobs.config.job_sections import TrainPolicy, TrainSection

pytestmark = pytest.mark.streams
PAGE = (Path(__file__).parents[3] / "docs" / "streams.md").read_text(encoding="utf-8")
CHAPTER = PAGE.split("\n## Coming from cosmos-rl")[1].split("\n## ")[0]


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", CHAPTER, re.DOTALL)


def test_its_code_runs():
    (code,) = blocks("python")
    exec(compile(code, "streams.md", "exec"), {})


def test_its_file_loads(tmp_path):
    (text,) = blocks("toml")
    (tmp_path / "job.toml").write_text(text)
    config = load_config(tmp_path / "job.toml")
    assert config.stream is not None and config.stream.batches_per_step == 4
    assert not config.notices


def test_it_maps_every_key():
    for settings in (TrainSection, TrainPolicy):
        for name in settings.model_fields:
            assert name in ("train_policy", "type") or f"`{name}`" in CHAPTER, name
