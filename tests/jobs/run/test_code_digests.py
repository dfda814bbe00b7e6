"""A resumed run says that the code of its reward or rollout function has changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roll_batching.jobs.config import config_from_dict
from roll_batching.jobs.inputs import load_inputs
from roll_batching.jobs.run.job_digests import changes, digests_of
from tests.jobs.rl.jobs import settings, write_data


@pytest.mark.parametrize(
    ("keys", "clause"),
    [
        ({"reward_function": "my_code:function"}, "the code of the reward my_code:function"),
        ({"rollout_function": "my_code:function"}, "the code of the rollout function my_code:function"),
    ],
)
def test_changed_code_is_named(tmp_path: Path, monkeypatch, keys: dict[str, Any], clause: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    write_data(tmp_path)
    config = config_from_dict(settings(tmp_path, **keys))
    inputs = load_inputs(config)
    code = tmp_path / "my_code.py"
    code.write_text("def function(completion): return 1.0\n")
    before = digests_of(config, inputs)
    assert changes(before, digests_of(config, inputs)) == []
    code.write_text("def function(completion): return 2.0\n")
    assert changes(before, digests_of(config, inputs)) == [clause]
