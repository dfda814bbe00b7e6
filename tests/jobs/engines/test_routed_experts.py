"""Router replay R3: the experts that servers return reach every optimizer step, or an error says what they lack."""

from __future__ import annotations

import base64
import io
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("aiohttp")

from roll_batching.errors import EngineError
from roll_batching.jobs.config import ConfigFileError, config_from_dict
from roll_batching.jobs.config.engine_rules import server_options
from roll_batching.jobs.engines.protocol import GenerationResult, MalformedReply, Mixture
from roll_batching.jobs.engines.replicas import EngineLimits, Replicas
from roll_batching.jobs.engines.routed_experts import checked_experts, decode_int32, decode_npy, mixture_of
from tests.huggingface import tiny
from tests.huggingface.test_job import job
from tests.jobs.engines.experts import routed_experts
from tests.jobs.engines.test_replicas import DIALECTS, SETTINGS, order, questions, start
from tests.jobs.rl.jobs import run_recording, write_data
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.cluster

HERE = "tests.jobs.engines.test_routed_experts:"
MIXTURE = Mixture(num_layers=4, layers=(0, 2, 3), top_k=2, num_experts=4)
"""Of tests.huggingface.tiny's qwen3_moe, whose layer 1 is dense."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixture") / "model"
    tiny.write_model(folder, "qwen3_moe")
    tiny.write_tokenizer(folder)
    return folder


@pytest.fixture
def folder(tmp_path, model):
    write_data(tmp_path)
    (tmp_path / "model").symlink_to(model)
    return tmp_path


def r3_job(folder: Any, urls: list[str], kind: str = "sglang", **changes: Any) -> dict[str, Any]:
    engine = {"strategy_args": {"strategy_name": kind}, "engine_args": {"urls": urls, "retries": 1}}
    base = {"warmup": None, "eval_samples": 0, "actor_infer": engine, "actor_train__router_replay": {"mode": "R3"}}
    return job(folder, **(base | changes))


def kept_batches(payload: dict[str, Any]) -> list[tuple[list[int], np.ndarray]]:
    """On a rank: the whole job; tokens and experts of each sample that its optimizer steps had."""

    kept: list[tuple[list[int], np.ndarray]] = []

    def record(batch: Any, plan: Any, counts: Any) -> None:
        rows = zip(batch.to_lists("input_ids"), batch.to_lists("routed_experts"), strict=True)
        kept.extend((tokens.tolist(), experts.numpy()) for tokens, experts in rows)

    run_recording(payload, record)
    return kept


@pytest.mark.parametrize(
    ("kind", "layout", "changes"),
    [
        ("sglang", {"expert_model_parallel_size": 2}, {}),
        pytest.param("vllm", {"context_parallel_size": 2}, {}, marks=pytest.mark.slow),
        pytest.param(
            "sglang", {"pipeline_model_parallel_size": 2}, {"async_generation_ratio": 1}, marks=pytest.mark.slow
        ),
    ],
)
def test_every_optimizer_step_has_the_experts_of_the_server(folder, model, kind, layout, changes):
    """The server returns experts that no router would choose; the last token of a sample has none."""
    server, urls = start(model, "--kind", kind, "--processed", "--experts")
    try:
        layout = {"actor_train__strategy_args__strategy_config": layout}
        ranks = run_ranks(2, HERE + "kept_batches", r3_job(folder, urls, kind, **layout, **changes), timeout=400)
    finally:
        server.kill()
    samples = [sample for kept in ranks for sample in kept]
    assert len(samples) >= 2 * 12
    for tokens, experts in samples:
        assert experts.dtype == np.int16 and (experts[-1] == -1).all()
        assert (experts[:-1] == routed_experts(tokens, 4, 2, 4)[:, [0, 2, 3]]).all()


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_servers_that_return_no_such_experts(kind, model):
    server, urls = start(model, "--kind", kind, "--processed", "--experts")
    try:
        engine = Replicas(urls, DIALECTS[kind], EngineLimits(seconds=30, retries=0))
        engine.update_weights(model.resolve(), 1)
        asked = [replace(request, mixture=MIXTURE) for request in questions(1, 1)]
        (result,) = engine.generate(asked, SETTINGS)
        tokens = [*asked[0].tokens, *result.tokens]
        assert (result.experts[:-1] == routed_experts(tokens, 4, 2, 4)[:, [0, 2, 3]]).all()
        assert engine.generate(questions(1, 1), SETTINGS)[0].experts is None
        for fault, words in {
            "experts_cut": r"has the shape .* tokens but the last, which was sampled and not computed",
            "experts_zero": r"sends token 0 twice to one expert in layer 0: \[0, 0\]. Zeros are experts",
            "experts_high": r"to expert 4 in layer \d, and the model has 0 to 3",
            "experts_text": "is not base64",
        }.items():
            order(urls[0], fault)
            with pytest.raises(EngineError, match=words):
                engine.generate(asked, SETTINGS)
    finally:
        server.kill()


# ---- values


def result_of(tokens: int) -> GenerationResult:
    return GenerationResult(tokens=[1] * tokens, log_probs=[-1.0] * tokens)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (np.zeros((6, 4, 2), dtype=np.int32), r"shape \[6, 4, 2\] of int32, not \[5, 4, 2\]"),
        (np.zeros((4, 5, 2), dtype=np.int32), r"not \[5, 4, 2\]"),
        (np.zeros((5, 4, 2)), "of float64"),
        (np.full((5, 4, 2), np.nan), "of float64"),
        (np.array([]), r"shape \[0\]"),
        (np.full((5, 4, 2), -1), "to expert -1 in layer 0"),
        (np.zeros((5, 4, 2), dtype=np.uint8), "twice"),
    ],
)
def test_experts_that_no_router_of_the_model_could_have_chosen(raw, words):
    with pytest.raises(MalformedReply, match=words):
        checked_experts(raw, MIXTURE, 4, result_of(2))


def test_dense_layers_are_left_out_and_the_last_token_is_open():
    raw = np.tile(np.array([[0, 1], [9, 9], [3, 2], [1, 3]]), (5, 1, 1))
    experts = checked_experts(raw.ravel(), MIXTURE, 4, result_of(2))
    assert experts.tolist() == [[[0, 1], [3, 2], [1, 3]]] * 5 + [[[-1, -1]] * 3] and experts.dtype == np.int16


HEADERS = (
    "{'descr': '<i4', 'fortran_order': False, 'shape': (5, 4, 2",
    "{'descr': '<i4', 'fortran_order': False, 'shape': (1 << 60,), }",
    f"{{'descr': '<i4', 'fortran_order': False, 'shape': ({1 << 60},), }}",
    f"{{'descr': '<i4', 'fortran_order': False, 'shape': ({1 << 80},), }}",
    "(" * 5000,
    "[1, 2]",
    "'\\x00",
)
"""Of .npy files, each malformed in another way."""


def npy(header: str) -> str:
    """Base64 of an .npy file with this header."""
    text = header.encode("latin1")
    return base64.b64encode(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(160)).decode()


@pytest.mark.bad_input
def test_texts_that_are_no_experts():
    pickled = io.BytesIO()
    np.save(pickled, np.array([{}]), allow_pickle=True)
    archive = io.BytesIO()
    np.savez(archive, np.zeros((5, 4, 2), dtype=np.int32))
    for decode, text, words in (
        (decode_int32, None, "Start the server with --enable-return-routed-experts"),
        (decode_npy, None, "--enable-return-routed-experts"),
        (decode_int32, 7, "is not base64"),
        (decode_int32, base64.b64encode(b"12345").decode(), "has 5 bytes"),
        (decode_npy, base64.b64encode(b"12345").decode(), "is no array"),
        (decode_npy, base64.b64encode(pickled.getvalue()).decode(), "is no array"),
        (decode_npy, base64.b64encode(archive.getvalue()).decode(), "is no array"),
        *((decode_npy, npy(header), "is no array") for header in HEADERS),
    ):
        with pytest.raises(MalformedReply, match=words):
            decode(text)


# ---- keys


@pytest.mark.config
def test_the_job_starts_its_servers_with_the_option(folder):
    own = r3_job(folder, [])
    del own["actor_infer"]["engine_args"]
    config = config_from_dict(own)
    assert server_options(config) == {"enable_return_routed_experts": True} and mixture_of(config) == MIXTURE
    assert (
        mixture_of(config_from_dict(own | {"actor_train": own["actor_train"] | {"router_replay": {"mode": "R2"}}}))
        is None
    )


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"actor_infer": {"strategy_args": {"strategy_name": "hf_infer"}}}, "strategy_name to sglang or vllm"),
        ({"actor_infer": {}}, "strategy_name to sglang or vllm"),
        ({"rollout_function": "tests.jobs.rollouts.rollout_functions:one_turn"}, "whose experts it does not return"),
    ],
)
def test_settings_that_exclude_it(folder, changes, words):
    with pytest.raises(ConfigFileError, match=words):
        config_from_dict(r3_job(folder, ["http://localhost:1"], **changes))
