"""The registered losses: entries agree with the losses' fields, and a job takes them by name."""

from __future__ import annotations

import dataclasses

import pytest

from roll_batching.jobs.config import load_config
from roll_batching.jobs.config.diagnostics import ConfigFileError
from roll_batching.jobs.config.loader import config_from_dict
from roll_batching.jobs.config.losses import LOSSES, ROLLOUT_FIELDS
from roll_batching.jobs.objectives.from_config import loss_of
from roll_batching.losses import PolicyLoss, loss_spec
from tests.support.ranks import ROOT


@pytest.mark.parametrize("entry", LOSSES, ids=lambda entry: entry.name)
def test_every_field_of_a_loss_has_a_key_of_the_job_or_stands_in_loss_args(entry):
    fields = {field.name for field in dataclasses.fields(LOSSES.load(entry.name))}
    assert {*entry.settings.model_fields, *entry.keys} == fields and not set(entry.settings.model_fields) & {
        *entry.keys
    }
    assert set(loss_spec(LOSSES.load(entry.name)()).masks) <= set(entry.reads)


def job(**changes):
    return config_from_dict(changes)


def test_settings_without_a_key_reach_the_loss():
    given = {"kl_estimator": "k2", "engine_ratio_cap": 2, "sample_weights": "rewards"}
    loss = loss_of(job(loss_args=given, use_kl_loss=True, kl_loss_coef=0.1, reference={}, pg_clip=0.3))
    assert loss == PolicyLoss(
        clip_low=0.3, clip_high=0.3, kl_coef=0.1, kl_estimator="k2", engine_ratio_cap=2.0, sample_weights="rewards"
    )
    assert type(loss.engine_ratio_cap) is float
    assert loss_of(job()) == PolicyLoss()
    assert loss_of(job(loss_function="sft", loss_args={"aggregation": "sequence_mean"})).aggregation == "sequence_mean"


def test_keys_that_losses_share_reach_each_of_them():
    shared = {"use_kl_loss": True, "kl_loss_coef": 0.1, "reference": {}, "loss_agg_mode": "seq-mean-token-mean"}
    for entry in LOSSES:
        if "kl_coef" not in entry.keys:
            continue
        found = job(loss_function=entry.name, pg_clip=0.3, **shared)
        loss = loss_of(found)
        assert (loss.kl_coef, loss.aggregation) == (0.1, "sequence_mean"), entry.name
        assert getattr(loss, "clip_high", 0.3) == 0.3, entry.name
        assert [notice.path for notice in found.notices] == ([] if "clip_low" in entry.keys else ["pg_clip"])
    assert loss_of(job(loss_function="sapo", loss_args={"temperature_negative": 2})).temperature_negative == 2.0


def test_the_bound_of_a_dual_clip_and_gspo_by_token_have_keys():
    assert loss_of(job(dual_clip_loss=True, pg_clip=0.1)).dual_clip == 1.2
    assert loss_of(job(dual_clip_loss=True, dual_clip_ratio=4)).dual_clip == 4.0
    assert loss_of(job(importance_sampling="seq-token")).ratio == "sequence_token"
    (told,) = job(dual_clip_ratio=4).notices
    assert told.text == "has no effect: dual_clip_loss is false"


def test_dr_grpos_constant_is_the_longest_response_or_as_given():
    from tests.losses.formulas import batch, run

    by_name = {"loss_agg_mode": "seq-mean-token-sum-norm", "response_length": 16}
    per_sequence = run(PolicyLoss(aggregation="sequence_sum"), batch())[0]
    assert run(loss_of(job(**by_name)), batch())[0] == pytest.approx(per_sequence / 16)
    assert run(loss_of(job(**by_name, loss_agg_length=64)), batch())[0] == pytest.approx(per_sequence / 64)
    (told,) = job(loss_agg_length=64).notices
    assert told.path == "loss_agg_length"


def test_settings_that_do_not_go_together_are_refused_with_their_place():
    with pytest.raises(ConfigFileError, match="engine_ratio_min is 3"):
        loss_of(job(loss_args={"engine_ratio_min": 3, "engine_ratio_cap": 2}))
    with pytest.raises(ConfigFileError, match="clip_low is 1.5; it must be"):
        loss_of(job(loss_function="cispo", pg_clip=1.5))


REFUSED = {
    "unknown name": ({"loss_args": {"kl_estimatr": "k1"}}, "loss_args.kl_estimatr", "did you mean 'kl_estimator'?"),
    "kind": ({"loss_args": {"engine_ratio_cap": "2"}}, "loss_args.engine_ratio_cap", "a valid number, got '2'"),
    "choice": ({"loss_args": {"kl_estimator": "k4"}}, "loss_args.kl_estimator", "'k1', 'k2', 'k3' or 'abs', got 'k4'"),
    "limit": ({"loss_args": {"engine_ratio_cap": 0}}, "loss_args.engine_ratio_cap", "greater than 0, got 0"),
    "not finite": ({"loss_args": {"engine_ratio_cap": float("inf")}}, "loss_args.engine_ratio_cap", "finite number"),
    "given by a key": ({"loss_args": {"clip_low": 0.1}}, "loss_args.clip_low", "set that, and leave this out"),
    "given twice": ({"pg_clip": 0.1, "loss_args": {"clip_high": 0.1}}, "loss_args.clip_high", "pg_clip_high"),
    "settings of another": ({"loss_function": "sft", "loss_args": {"beta": 0.1}}, "loss_args.beta", "are aggregation"),
    "pairs": ({"loss_function": "dpo", "reference": {}}, "loss_function", "reads pair and chosen, which rollouts do"),
    "no such loss": (
        {"loss_function": "polcy"},
        "loss_function",
        "did you mean 'policy'? choose policy, cispo, ",
    ),
    "no section": ({"loss_args": 3}, "loss_args", "expected keys and values, got 3"),
    "no estimator": (
        {"adv_estimator": "grop"},
        "adv_estimator",
        "did you mean 'grpo'? choose grpo, reinforce, step_reinforce, ",
    ),
}


@pytest.mark.bad_input
@pytest.mark.parametrize("name", REFUSED)
def test_settings_are_checked_when_the_file_is_read(name, report):
    changes, path, words = REFUSED[name]
    with pytest.raises(ConfigFileError) as caught:
        job(**changes)
    (problem,) = caught.value.problems
    assert ".".join(map(str, problem.path)) == path and words in problem.message, str(problem)
    report(f"{name}: {problem}")


@pytest.mark.bad_input
def test_with_file_and_line(tmp_path, report):
    file = tmp_path / "job.yaml"
    file.write_text("seed: 1\nloss_args:\n  engine_ratio_cap: 2\n  beta: 1\n")
    with pytest.raises(ConfigFileError) as caught:
        load_config(file)
    assert f"{file}:4: loss_args.beta: unknown setting" in str(caught.value)


def test_settings_without_effect_have_a_notice():
    own = job(loss_function="my:Loss", adv_estimator="my:estimate", pg_clip=0.1, norm_std_type="batch", reference={})
    assert [notice.path for notice in own.notices] == ["pg_clip", "norm_std_type"]
    idle, told = job(loss_function="sft", reference={}).notices
    assert told.path == "loss_function" and "rewards are measured and change nothing" in told.text
    assert (idle.path, idle.text) == ("reference", "is not built: the loss sft does not read it")
    (told,) = job(loss_args={"kl_estimator": "k1"}).notices
    assert told.path == "loss_args.kl_estimator" and "use_kl_loss is false" in told.text


def test_the_pages_name_every_loss_and_every_field():
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    custom = (ROOT / "docs" / "custom-losses.md").read_text(encoding="utf-8")
    for entry in LOSSES:
        assert f"| `{entry.name}` | {entry.summary} |" in page
    for name in ROLLOUT_FIELDS:
        assert f"| `{name}` |" in custom, name
