"""The folder of a tiny job whose rollouts come from an engine."""

from __future__ import annotations

import pytest

from tests.huggingface import tiny
from tests.jobs.rl.jobs import write_data


@pytest.fixture
def folder(tmp_path):
    """Prompts, a tiny model of Hugging Face and its tokenizer."""
    write_data(tmp_path)
    tiny.write_model(tmp_path / "model", "qwen3")
    tiny.write_tokenizer(tmp_path / "model")
    return tmp_path
