"""A job whose states wait on the host between their turns writes the rows of one whose states stay."""

from __future__ import annotations

from roll_batching.jobs.observe.run_files import read_metrics
from tests.jobs.rl.jobs import settings, write_data
from tests.jobs.run.test_resume import TIMES
from tests.support.ranks import run_ranks

KL = {"use_kl_loss": True, "kl_loss_coef": 0.1, "reference": {}}


def rows(folder, **changes):
    folder.mkdir()
    write_data(folder)
    small = {"reward_function": "tests.jobs.rl.jobs:length", "warmup": None, "eval_steps": 1, "save_steps": 1}
    run_ranks(1, "tests.jobs.rl.jobs:run", settings(folder, **small, **KL, **changes))
    return read_metrics(folder / "runs" / "tiny" / "metrics.jsonl")


def test_states_that_wait_on_the_host_change_no_bit(tmp_path, report):
    stay, wait = rows(tmp_path / "stay"), rows(tmp_path / "wait", is_offload_states=True)
    own = {"offload_bytes", "offload_seconds"}
    assert [{k: v for k, v in row.items() if k not in TIMES | own} for row in wait] == [
        {k: v for k, v in row.items() if k not in TIMES} for row in stay
    ]
    assert all(row["offload_bytes"] > 0 and row["offload_seconds"] > 0 for row in wait)
    assert not own & stay[0].keys()
    report(f"a job with states on the host in between: the same rows, {wait[1]['offload_bytes']:,} bytes moved a step")
