"""Jobs with the same weights_folder have separate folders of model directories."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from roll_batching.jobs.config import config_from_dict
from roll_batching.jobs.engines.sampler import weights_folder
from roll_batching.jobs.observe.run_files import read_metrics
from tests.huggingface import tiny
from tests.huggingface.test_job import job
from tests.jobs.observe.rows import TIMES
from tests.jobs.rl.jobs import write_data
from tests.jobs.run.test_folder import held_elsewhere
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.cluster
RUN = "tests.jobs.rl.jobs:run"


@pytest.fixture
def folder(tmp_path):
    write_data(tmp_path)
    tiny.write_model(tmp_path / "model", "llama3")
    tiny.write_tokenizer(tmp_path / "model")
    return tmp_path


def of(folder, output_dir, **changes):
    """A job in `output_dir` whose weights go through /weights of `folder`, under the name of all of them."""
    engine = {"weights_folder": str(folder / "weights")}
    role = {"strategy_args": {"strategy_name": "hf_infer"}, "engine_args": engine}
    return job(folder, warmup=None, actor_infer=role, output_dir=str(folder / output_dir), **changes)


def test_jobs_of_one_name_have_folders_of_their_own(folder, monkeypatch):
    one, other = (weights_folder(config_from_dict(of(folder, name))) for name in ("one", "other"))
    assert one.parent == other.parent == folder / "weights" and one != other and one.name.startswith("tiny-")
    monkeypatch.chdir(folder)
    again = of(folder, "one") | {"output_dir": "one"}
    assert weights_folder(config_from_dict(again)) == one, "a run that goes on finds what it left"


@pytest.mark.bad_input
def test_a_job_does_not_write_into_the_weights_of_another(folder):
    """As on two machines that share weights_folder, and whose own disks have the same paths."""
    settings = of(folder, "one")
    place = weights_folder(config_from_dict(settings))
    with held_elsewhere(place) as process:
        outcomes = run_ranks(2, RUN, settings, check=False)
    for outcome in outcomes:
        assert outcome.returncode and f"{place} is in use by another run (process {process.pid}" in outcome.output
    assert sorted(path.name for path in place.iterdir()) == [".lock", "taken"]


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [{}, {"async_generation_ratio": 1}], ids=["in step", "ahead"])
def test_two_jobs_of_one_name_at_the_same_time(folder, ahead):
    """Rows of each as if it were alone, and nothing left of either."""

    def run(output_dir, seed):
        run_ranks(1, RUN, of(folder, output_dir, seed=seed, max_steps=4, **ahead), timeout=600)
        rows = read_metrics(folder / output_dir / "tiny" / "metrics.jsonl")
        return [{key: value for key, value in row.items() if key not in TIMES} for row in rows]

    with ThreadPoolExecutor() as pool:
        together = list(pool.map(run, ("one", "other"), (3, 4)))
    assert not list((folder / "weights").iterdir())
    if not ahead:
        assert together == [run("alone", 3), run("lonely", 4)]
    assert [len(rows) for rows in together] == [4, 4]
