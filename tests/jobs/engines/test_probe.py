"""After a weight update the engine's log-probs of a probe are the trainer's, or the job says that they are not."""

from __future__ import annotations

import pytest

from roll_batching.errors import EngineError
from roll_batching.jobs.engines.probe import GapLimit, Probe
from tests.huggingface import tiny
from tests.huggingface.test_job import job
from tests.jobs.engines.test_job import rows_of
from tests.jobs.engines.test_replicas import start
from tests.jobs.rl.jobs import write_data
from tests.support.ranks import run_ranks

pytest.importorskip("aiohttp")
pytestmark = pytest.mark.cluster


@pytest.fixture
def folder(tmp_path):
    write_data(tmp_path)
    tiny.write_model(tmp_path / "model", "llama3")  # its output head is tied to the embeddings
    tiny.write_tokenizer(tmp_path / "model")
    return tmp_path


def role(kind, urls):
    return {"strategy_args": {"strategy_name": kind}, "engine_args": {"urls": urls}}


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("kind", "ranks", "changes"),
    [
        ("vllm", 2, {}),
        ("sglang", 1, {"actor_train__logprob_plan": "rollout"}),  # the trainer computes no log-probs of rollouts
        ("vllm", 1, {"async_generation_ratio": 1}),
    ],
    ids=["vllm", "sglang", "asynchronous"],
)
def test_an_engine_that_keeps_its_head_ends_the_job(folder, kind, ranks, changes, report):
    """It reports success at each update; the first weights are those it was started with."""
    server, urls = start(folder / "model", "--kind", kind, "--processed", "--keeps-head", "always")
    try:
        given = job(folder, warmup=None, max_steps=3, actor_infer=role(kind, urls), **changes)
        outcomes = run_ranks(ranks, "tests.jobs.rl.jobs:run", given, check=False)
    finally:
        server.kill()
    for outcome in outcomes:
        assert outcome.returncode == 1, outcome.output
        assert "it has other weights than were sent" in outcome.output, outcome.output
    report(outcomes[0].output.splitlines()[-1])
    assert len(rows_of(folder, "tiny")) < 3, "an asynchronous job trains on what the first weights sampled"


def test_a_head_that_vllm_packs_on_a_cpu_is_sent(folder):
    server, urls = start(folder / "model", "--kind", "vllm", "--processed", "--keeps-head", "tied")
    try:
        run_ranks(2, "tests.jobs.rl.jobs:run", job(folder, warmup=None, max_steps=3, actor_infer=role("vllm", urls)))
    finally:
        server.kill()
    rows = rows_of(folder, "tiny")
    assert len(rows) == 3 and all(row["engine_gap_max"] < 1e-4 for row in rows)


def test_a_limit_follows_the_first_gap():
    """Rounding of both sides shows in the first gap; outliers of a few tokens do not count; nan never passes."""
    probe = Probe(tokens=[1, 2, 3, 4], log_probs=[-1.0, -2.0, -3.0], largest_gap=0.05)
    assert probe.gap([-1.01, -2.02, -9.0]) == pytest.approx(0.02)
    with pytest.raises(EngineError, match="sent 2 log-probs for a prompt of 4 tokens"):
        probe.gap([-1.0, -2.0])
    limit = GapLimit()
    for gap in (0.5, float("nan")):
        with pytest.raises(EngineError, match="other weights"):
            limit.check(gap, 0.05)
    limit.check(0.01, 0.05)
    limit.check(0.039, 0.05)
    with pytest.raises(EngineError, match="by 0.041 in the median, and rounding explains 0.04"):
        limit.check(0.041, 0.05)
    exact = GapLimit()
    exact.check(1e-6, 0.05)
    with pytest.raises(EngineError, match="other weights"):
        exact.check(2e-4, 0.05)


@pytest.mark.bad_input
def test_the_precision_of_the_trainer_bounds_the_first_gap_too(folder):
    """A median of 0.041 in bf16 is of rounding, and 0.06 after it is not; fp32 rounds far less."""
    limit = GapLimit()
    limit.check(0.041, 0.05)
    for checked, gap, largest in ((limit, 0.06, 0.05), (GapLimit(), 0.06, 0.05), (GapLimit(), 0.002, 1e-3)):
        with pytest.raises(EngineError, match=f"rounding explains {largest:.2g}.*model_args.dtype"):
            checked.check(gap, largest)
    run_ranks(1, "tests.jobs.engines.test_probe:check_largest_gap", job(folder))


def check_largest_gap(settings):
    from roll_batching.jobs.config import config_from_dict
    from roll_batching.jobs.engines.probe import make_probe
    from roll_batching.strategy import MegatronTrainStrategy

    config = config_from_dict(settings)
    for dtype, expected in (("fp32", 1e-3), ("bf16", 0.05)):
        model = config.actor_train.model_args.model_copy(update={"dtype": dtype})
        worker = config.actor_train.model_copy(update={"model_args": model})
        strategy = MegatronTrainStrategy(worker, seed=0)
        strategy.initialize()
        assert make_probe(strategy).largest_gap == expected, dtype
