"""GRPO on prompts with images that a server answers: what it gets, its log-probs, and what it may not do."""

from __future__ import annotations

import json

import numpy as np
import pytest

from roll_batching.jobs.engines.routed_experts import images_of_prompts, picture_of
from roll_batching.jobs.observe.run_files import read_metrics
from roll_batching.jobs.texts.encode import encode_prompts
from roll_batching.jobs.texts.image_references import ImageReference
from roll_batching.jobs.texts.image_tokenizer import ImageTokenizer, with_images
from roll_batching.jobs.texts.texts import Prompt
from roll_batching.settings.model_parts import VisionConfig
from tests.huggingface.test_vision_jobs import folder, rl  # noqa: F401
from tests.jobs.engines.test_replicas import order, seen, start
from tests.support import vision
from tests.support.ranks import run_ranks

pytest.importorskip("aiohttp")
pytestmark = [pytest.mark.cluster, pytest.mark.models]


def engine(urls, **arguments):
    return {"strategy_args": {"strategy_name": "sglang"}, "engine_args": {"urls": urls, **arguments}}


def test_a_server_sees_the_images_of_training(folder, report):  # noqa: F811
    server, urls = start(folder / "model")
    try:
        data = rl(folder, "engine", actor_infer=engine(urls), actor_train__logprob_plan="own")
        data["actor_train"]["training_args"]["per_device_train_batch_size"] = 8
        run_ranks(2, "tests.jobs.rl.jobs:run", data)
        told = seen(urls[0])
    finally:
        server.kill()
    rows = read_metrics(folder / "runs" / "engine" / "metrics.jsonl")
    assert len(rows) == 2 and all(0 < row["engine_gap_mean"] < 1e-5 and row["engine_gap_max"] < 1e-4 for row in rows)
    assert told["images"] == 8 * (2 * 2 + 2), "eight images: two steps, two responses to each prompt, two evaluations"
    report(f"mismatch of log-probs: {rows[-1]['engine_gap_mean']:.1e} in the mean, {rows[-1]['engine_gap_max']:.1e}")


@pytest.mark.slow
def test_a_server_answers_as_the_model_in_training_does(folder):  # noqa: F811
    """Greedy responses, and rewards of evaluations, are those of Megatron's own sampling."""
    greedy = {"adv_estimator": "reinforce", "num_return_sequences_in_group": 1, "rollout_samples": -1}
    greedy["actor_train__training_args__per_device_train_batch_size"] = 8
    sampling = {"generating_args": {"do_sample": False}}
    server, urls = start(folder / "model")
    try:
        for name, infer in {"own": {}, "served": engine(urls)}.items():
            run_ranks(1, "tests.jobs.rl.jobs:run", rl(folder, name, **greedy, actor_infer={**infer, **sampling}))
    finally:
        server.kill()
    own, served = (
        [json.loads(line)["response"] for line in (folder / "runs" / name / "rollouts.jsonl").read_text().splitlines()]
        for name in ("own", "served")
    )
    assert own == served and len(own) == 2 * 8 + 2 * 8


@pytest.mark.slow
def test_a_reference_in_another_layout_computes_the_images(folder, report):  # noqa: F811
    """The reference is the policy at the start, so the divergence is 0 before the first update, in any layout."""
    layouts = {
        "actor_train": {"context_parallel_size": 2},
        "reference": {"context_parallel_size": 1, "tensor_model_parallel_size": 2},
    }
    found = {}
    for name, sizes in {"same": {}, "other": layouts}.items():
        server, urls = start(folder / "model")
        try:
            data = rl(
                folder, name, actor_infer=engine(urls), use_kl_loss=True, kl_loss_coef=0.1, reference={}, max_steps=2
            )
            data["actor_train"]["training_args"]["per_device_train_batch_size"] = 16 if sizes else 8
            for role, layout in sizes.items():
                data[role]["strategy_args"] = {"strategy_config": layout}
            run_ranks(2, "tests.jobs.rl.jobs:run", data)
        finally:
            server.kill()
        rows = read_metrics(folder / "runs" / name / "metrics.jsonl")
        found[name] = [(row["loss"], row["ref_kl"], row["grad_norm"]) for row in rows]
    report(str(found))
    assert abs(found["other"][0][1]) < 1e-9 < found["other"][-1][1]
    np.testing.assert_allclose(found["other"], found["same"], atol=2e-5)


@pytest.mark.bad_input
def test_a_server_that_makes_other_tokens_ends_the_job(folder, report):  # noqa: F811
    server, urls = start(folder / "model")
    try:
        order(urls[0], "longer", 99)
        (error,) = run_ranks(1, "tests.jobs.rl.jobs:refusal", rl(folder, "longer", actor_infer=engine(urls)))
    finally:
        server.kill()
    assert "tokens of a prompt with images that has" in error
    report(error)


def test_pictures_are_rebuilt_from_patches(folder):  # noqa: F811
    tokenizer = ImageTokenizer(folder / "model", folder=folder / "model")
    images = [ImageReference(path=folder / f"{number}.png") for number in (0, 3)]
    prompts = [Prompt(f"{tokenizer.image_text}a{tokenizer.image_text}", "", images=tuple(images)), Prompt("b", "")]
    batch = with_images(encode_prompts(prompts, tokenizer, max_length=99), prompts, tokenizer)
    (one, none) = images_of_prompts(batch, VisionConfig.model_validate(SETTINGS))
    assert none is None and tokenizer.decode(one.tokens) == prompts[0].prompt and len(one.data) == 2
    pixels, grids = tokenizer.processor.encode(images[:1])
    _, height, width = grids[0].tolist()
    upright = vision.picture(0, 70, 50).resize((width * 14, height * 14), 3)
    assert np.array_equal(picture_of(pixels, height, width, 14, 2), np.asarray(upright))


SETTINGS = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "image_token_id": vision.IMAGE,
    "video_token_id": vision.VIDEO,
    "vision_start_token_id": vision.START,
    "vision_end_token_id": vision.END,
}
