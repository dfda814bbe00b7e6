from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs.rl.jobs import settings, write_data
from tests.support.ranks import run_ranks


@pytest.fixture(scope="session")
def real_run(tmp_path_factory) -> Path:
    """The folder of a tiny GRPO job with a warm-up, as two ranks wrote it. Tests do not change it."""
    pytest.importorskip("plotly", reason="pip install plotly")
    folder = tmp_path_factory.mktemp("report")
    write_data(folder)
    job = settings(folder, max_steps=3, eval_steps=2, warmup__training_args__max_steps=4, rollout_samples=-1)
    run_ranks(2, "tests.jobs.rl.jobs:run", job)
    return folder / "runs" / "tiny"
