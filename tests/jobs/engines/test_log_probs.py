"""Log-probs of vLLM and SGLang in the loss: of the trainer's distribution, or refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from roll_batching.jobs.config import ConfigFileError, config_from_dict
from roll_batching.jobs.config.engine_rules import server_options
from roll_batching.jobs.engines.replicas import Replicas
from roll_batching.jobs.engines.vllm import VLLM
from tests.huggingface.test_job import job
from tests.jobs.engines import test_replicas
from tests.jobs.engines.test_replicas import SETTINGS, check_log_probs, questions, start
from tests.support.ranks import run_ranks

pytest.importorskip("aiohttp")
pytestmark = pytest.mark.cluster

ROLLOUT = {"actor_train__logprob_plan": "rollout"}
CORRECTED = {"loss_args": {"engine_ratio_cap": 2.0}}
AHEAD = {"async_generation_ratio": 1}


def configured(folder, sampling, options=None, urls=(), engine="vllm", **changes):
    role = {"strategy_args": {"strategy_name": engine}, "generating_args": sampling}
    if options:
        role["strategy_args"]["strategy_config"] = options
    if not sampling.get("do_sample", True):  # equal responses are refused in groups
        changes |= {"adv_estimator": "reinforce", "num_return_sequences_in_group": 1}
    if urls:
        role["engine_args"] = {"urls": list(urls)}
    return job(folder, actor_infer=role, warmup=None, **changes)


@pytest.mark.bad_input
@pytest.mark.parametrize("changes", [ROLLOUT, CORRECTED, AHEAD], ids=["rollout", "corrected", "ahead"])
@pytest.mark.parametrize(
    ("sampling", "options", "key"),
    [
        ({"temperature": 0.9, "top_p": 0.9}, {}, "actor_infer.generating_args.top_p"),
        ({"temperature": 0.9, "top_k": 20}, {}, "actor_infer.generating_args.top_k"),
        ({"temperature": 0.9, "do_sample": False}, {}, "actor_infer.generating_args.temperature"),
        ({"top_k": 20}, {"logprobs_mode": "processed_logprobs"}, "strategy_config.logprobs_mode"),
        ({"temperature": 0.9}, {"logprobs_mode": "raw_logprobs"}, "strategy_config.logprobs_mode"),
        ({}, {"logprobs_mode": "raw_logits"}, "strategy_config.logprobs_mode"),
    ],
)
def test_log_probs_of_another_distribution_do_not_train(folder, sampling, options, key, changes, report):
    with pytest.raises(ConfigFileError, match=key) as caught:
        config_from_dict(configured(folder, sampling, options, **changes))
    report(str(caught.value))
    if changes is not AHEAD:
        assert config_from_dict(configured(folder, sampling, options)), (
            "logprob_plan: train: the loss does not read them"
        )


RAW = {"logprobs_mode": "raw_logprobs"}


@pytest.mark.config
@pytest.mark.parametrize(
    ("sampling", "own", "mode"),
    [
        ({"top_p": 0.9}, None, RAW),
        ({"temperature": 0.9}, None, {}),
        ({"temperature": 0.9}, 1.0, RAW),
        ({"temperature": 0.9, "top_p": 0.9}, 1.0, RAW),
        ({"temperature": 0.9, "do_sample": False}, 1.0, {}),
        ({}, None, {}),
    ],
)
def test_servers_that_the_job_starts_have_the_mode_that_fits(folder, sampling, own, mode):
    """`own`: the loss's temperature. Without a mode here they have vLLM's processed log-probs."""
    changes = ROLLOUT if own is None else ROLLOUT | {"actor_train__logprob_temperature": own}
    assert server_options(config_from_dict(configured(folder, sampling, **changes))) == mode


@pytest.mark.bad_input
def test_log_probs_at_another_temperature_than_the_losss_do_not_train(folder):
    changes = ROLLOUT | {"actor_train__logprob_temperature": 0.5}
    with pytest.raises(ConfigFileError, match="log-probs at temperature 0.5.*only at temperature 1 or at tempera"):
        config_from_dict(configured(folder, {"temperature": 0.9}, **changes))


@pytest.mark.bad_input
@pytest.mark.parametrize("changes", [ROLLOUT, CORRECTED, AHEAD], ids=["rollout", "corrected", "ahead"])
@pytest.mark.parametrize("urls", [(), ("http://127.0.0.1:1",)], ids=["own", "urls"])
@pytest.mark.parametrize(
    ("sampling", "own", "message"),
    [
        ({"temperature": 0.9}, 1.0, "actor_train.logprob_temperature: SGLang's log-probs are at temperature 0.9"),
        (
            {"temperature": 0.9, "top_p": 0.9},
            0.5,
            "but those of the loss at 0.5, .*: set it to 0.9, or use logprob_plan",
        ),
        (
            {"temperature": 0.9, "do_sample": False},
            None,
            "temperature: SGLang's log-probs of greedy responses are at temperature 1, .*set actor_train",
        ),
    ],
)
def test_sglangs_log_probs_are_at_the_sampling_temperature(folder, sampling, own, message, urls, changes, report):
    temperature = {} if own is None else {"actor_train__logprob_temperature": own}
    with pytest.raises(ConfigFileError, match=message) as caught:
        config_from_dict(configured(folder, sampling, urls=urls, engine="sglang", **changes, **temperature))
    assert len(caught.value.problems) == 1
    report(str(caught.value))
    if changes is not AHEAD:
        unread = configured(folder, sampling, urls=urls, engine="sglang", **temperature)
        assert config_from_dict(unread), "logprob_plan: train: the loss does not read them"
    fitting = {"actor_train__logprob_temperature": 0.9 if sampling.get("do_sample", True) else 1.0}
    assert config_from_dict(configured(folder, sampling, urls=urls, engine="sglang", **changes, **fitting))


def test_sglang_servers_of_the_job_have_log_probs_at_the_sampling_temperature(folder, monkeypatch):
    """Also where the environment of the job says otherwise."""
    from roll_batching.jobs.engines.servers import _make_servers

    for name, value in {"SGLANG_RETURN_ORIGINAL_LOGPROB": "1", "LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    config = config_from_dict(configured(folder, {"temperature": 0.9}, engine="sglang", **ROLLOUT))
    for program in _make_servers(config).programs:
        assert program.environment["SGLANG_RETURN_ORIGINAL_LOGPROB"] == "false"


def test_raw_log_probs_at_temperature_1_are_the_trainers(folder, monkeypatch):
    """Whatever top_k and top_p leave; the processed ones are not, and a job whose loss would read them ends at once."""
    from transformers import AutoModelForCausalLM

    settings = replace(SETTINGS, temperature=1.0)
    monkeypatch.setattr(test_replicas, "SETTINGS", settings)
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    started = [start(folder / "model", "--kind", "vllm", *options) for options in ((), ("--processed",))]
    try:
        for (_, urls), processed in zip(started, (False, True), strict=True):
            engine = Replicas(urls, VLLM())
            engine.update_weights((folder / "model").resolve(), 1)
            asked = questions(2, 3)
            check_log_probs(model, asked, engine.generate(asked, settings), processed)
        sampling = {"top_k": 20, "top_p": 0.9}
        outcome = run_ranks(
            1, "tests.jobs.rl.jobs:run", configured(folder, sampling, urls=started[1][1], **ROLLOUT), check=False
        )[0]
        assert outcome.returncode == 1, outcome.output
        assert "of the tokens that top_p and top_k leave" in outcome.output.splitlines()[-1], outcome.output
    finally:
        for server, _ in started:
            server.kill()
