"""A job on Ray with rollouts by an engine: two ranks, one server, the rows of torchrun."""

from __future__ import annotations

import json

import pytest

from tests.huggingface import tiny
from tests.huggingface.test_job import job
from tests.jobs.engines.test_replicas import seen, start
from tests.jobs.launch.clusters import on_ray
from tests.jobs.launch.commands import done
from tests.jobs.launch.test_ray import by_torchrun, rows
from tests.jobs.rl.jobs import write_data

pytest.importorskip("aiohttp")
pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def test_an_engine_gives_the_bits_of_torchrun_to_ranks_on_ray(tmp_path, report):
    """Weights go to the server from rank 0, wherever it lives, and every draw has the seed of its prompt."""
    tiny.write_model(tmp_path / "model", "qwen3")
    tiny.write_tokenizer(tmp_path / "model")
    write_data(tmp_path)
    server, urls = start(tmp_path / "model")
    try:
        engine = {"strategy_args": {"strategy_name": "sglang"}, "engine_args": {"urls": urls}}
        changes = {"warmup": None, "max_steps": 3, "loss_args": {"engine_ratio_cap": 2.0}, "actor_infer": engine}
        files = {}
        for way in ("ray", "torchrun"):
            (tmp_path / way).mkdir()
            files[way] = tmp_path / way / "job.yaml"
            output = str(tmp_path / way / "runs")
            files[way].write_text(json.dumps(job(tmp_path, **changes) | {"output_dir": output}))
        code, said = done(tmp_path / "ray", *on_ray(files["ray"], address="local"), timeout=400)
        assert code == 0, said
        asked = seen(urls[0])["requests"]
        by_torchrun(tmp_path / "torchrun", files["torchrun"], machines=1, each=2)
        assert seen(urls[0])["requests"] == 2 * asked == 2 * (3 * 4 * 3 + 2 * 5)
    finally:
        server.kill()
    ours, theirs = rows(tmp_path / "ray"), rows(tmp_path / "torchrun")
    assert [row["step"] for row in ours] == [1, 2, 3] and ours[-1]["grad_norm"] > 0
    assert ours == theirs
    report(f"an engine under Ray: the rows of torchrun to the bit, rewards {[row['reward'] for row in ours]}")
