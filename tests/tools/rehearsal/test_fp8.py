"""Rehearsed FP8 jobs: packs aligned as on the device, copies of weights in FP8, and what is assumed."""

from __future__ import annotations

from typing import Any

import pytest

from roll_batching.jobs.config import config_from_dict
from roll_batching.settings import MegatronConfig
from roll_batching.tools.rehearsal.job import rehearse_job
from roll_batching.tools.rehearsal.stages import copies_in_fp8
from tests.tools.rehearsal.jobs import ARCHITECTURE, job_of

pytestmark = pytest.mark.rehearse

FP8 = {"fp8": "e4m3", "fp8_recipe": "blockwise", "transformer_impl": "transformer_engine"}
LAYERS = 4
WEIGHTS = (128 + 2 * 64) * 128 + 128 * 128 + 3 * 320 * 128
"""Numbers in the matrices of a layer of `ARCHITECTURE`: queries, keys and values, output, feed-forward."""


def rehearsal_of(**megatron: Any) -> Any:
    job = job_of(megatron=megatron)
    job["actor_train"]["model_args"] = {"architecture": ARCHITECTURE, "dtype": "bf16"}
    return rehearse_job(config_from_dict(job), lengths=[200, 130, 90])


@pytest.mark.slow
def test_an_fp8_job_is_rehearsed_with_its_alignment_and_its_copies_of_weights() -> None:
    found, plain = rehearsal_of(**FP8, first_last_layers_bf16=True), rehearsal_of()
    (stage,), (other,) = found.stages, plain.stages
    assert (stage.report.tokens["training"], other.report.tokens["training"]) == (512, 420)
    assert stage.report.layer_weights == LAYERS * WEIGHTS
    assert stage.fp8_copies == 2 * WEIGHTS * (LAYERS - 2) and other.fp8_copies == 0
    assert [margin.bytes for margin in stage.margins if "FP8" in margin.reason] == [stage.fp8_copies]
    assert stage.need - stage.peak - stage.fp8_copies == pytest.approx(other.need - other.peak, rel=0.05)
    assert any("FLOPs are those of bf16" in note for note in stage.report.notes)
    assert "generate is not supported in FP8" in found.fault and plain.fault is None


LATENT = {"kv_lora_rank": 64, "qk_head_dim": 32, "qk_pos_emb_head_dim": 16, "v_head_dim": 32}
DELTA = {
    "layers": [1, 1, 1, 0], "num_key_heads": 4, "num_value_heads": 8, "key_head_dim": 16, "value_head_dim": 16,
}  # fmt: skip
HIDDEN, FEED_FORWARD = 128, 3 * 320 * 128


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "weights"),
    [
        (
            {"multi_latent_attention": LATENT, "kv_channels": None, "num_query_groups": 4},
            LAYERS * (4 * 48 * HIDDEN + 80 * HIDDEN + 64 * 4 * 64 + 4 * 32 * HIDDEN + FEED_FORWARD),
        ),
        (
            {"gated_delta_net": DELTA},
            LAYERS * FEED_FORWARD + 3 * (2 * (64 + 128 + 8) + 128) * HIDDEN + (WEIGHTS - FEED_FORWARD),
        ),
    ],
    ids=["latent attention", "gated delta nets"],
)
def test_copies_of_latent_attention_and_gated_delta_nets(part: dict[str, Any], weights: int) -> None:
    job = job_of(megatron=FP8)
    job["actor_train"]["model_args"] = {"architecture": {**ARCHITECTURE, **part}, "dtype": "bf16"}
    (stage,) = rehearse_job(config_from_dict(job), lengths=[200, 130, 90]).stages
    assert stage.report.layer_weights == weights and stage.fp8_copies == 2 * weights
    assert stage.report.tokens["training"] == 512


def test_copies_are_those_of_the_layers_of_a_stage() -> None:
    split = ((2, 2), (2, 2))  # two stages of two chunks: layers 0 1 4 5, and 2 3 6 7
    layout = MegatronConfig(**FP8, first_last_layers_bf16=True, num_layers_at_start_in_bf16=2)
    assert [copies_in_fp8(layout, split, stage, 400.0) for stage in (0, 1)] == [2 * 400 * 2 / 4, 2 * 400 * 3 / 4]
    assert copies_in_fp8(MegatronConfig(), split, 0, 400.0) == 0
    mxfp8 = MegatronConfig(**{**FP8, "fp8_recipe": "mxfp8"})
    assert copies_in_fp8(mxfp8, split, 0, 32.0) == 66
