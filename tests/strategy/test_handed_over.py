"""Models that are handed over: what would train on wrong numbers, or leave ranks waiting, is refused or done right."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.ranks import run_ranks

pytestmark = pytest.mark.layouts

HERE = "tests.strategy.test_handed_over:"


def _adopt(parts: Any, mode: str = "packed", **options: Any) -> Any:
    from roll_batching.strategy import MegatronTrainStrategy
    from tests.strategy.test_from_parts import _batching

    return MegatronTrainStrategy.from_parts(*parts, _batching(mode), vocab_size=61, **options)


def refusal(parts: Any, mode: str = "packed", **options: Any) -> str:
    """What `from_parts` answers: the text of its error, or "nothing"."""
    from roll_batching.errors import RollBatchingError

    try:
        _adopt(parts, mode, **options)
    except RollBatchingError as error:
        return str(error)
    return "nothing"


def heads_that_gather(_: None) -> dict[str, str]:
    from tests.strategy.test_from_parts import _start
    from tests.support.own_model import build

    found = {}
    _start(tp=2)
    found["tp2"] = refusal(build("packed", parallel_output=False))
    found["tp2 deferred"] = refusal(build("packed", parallel_output=False), defer_head=True)
    changed = build("packed")
    changed[0][0].module.output_layer.gather_output = True
    found["tp2 layer"] = refusal(changed)
    _start(pp=2)
    found["pp2"] = refusal(build("packed", parallel_output=False))
    return found


def test_a_head_that_gathers_its_output_is_refused_under_tensor_parallelism() -> None:
    for found in run_ranks(2, HERE + "heads_that_gather"):
        for name in ("tp2", "tp2 layer"):
            assert "parallel_output=True" in found[name] and "defer_head=True" in found[name], found[name]
        assert found["tp2 deferred"] == found["pp2"] == "nothing"


def nan_checks(_: None) -> dict[str, str]:
    from tests.strategy.test_from_parts import _start
    from tests.support.own_model import build

    _start()
    names = ("check_for_nan_in_grad", "check_for_large_grads")
    return {name: refusal(build("packed", rotate="core", ddp={name: True})) for name in names}


def test_checks_of_gradients_that_one_rank_would_fail_alone_are_refused() -> None:
    for found in run_ranks(2, HERE + "nan_checks"):
        for name, text in found.items():
            assert f"ddp_config.{name}=False" in text, text


def log_probs_without_rotation(payload: tuple[str, int, Any]) -> tuple[torch.Tensor, float]:
    """(log-probs of a batch, largest gap to those recorded while sampling) of a model with `no_rope_freq`."""
    from roll_batching.samples import gather_lengths
    from roll_batching.strategy import GenerationSettings
    from tests.strategy.test_from_parts import _batch, _start
    from tests.support.own_model import build

    rotate, pp, freq = payload
    _start(pp=pp)
    strategy = _adopt(build("packed", layers=4, rotate=rotate, no_rope_freq=freq))
    batch = _batch()
    found = strategy.compute_log_probs(batch, strategy.plan(gather_lengths(batch), forward=True))["log_probs"]
    prompts = batch.select([1, 3])
    out = strategy.generate(prompts, GenerationSettings(max_new_tokens=6, eos_token_id=60, greedy=True))
    again = strategy.compute_log_probs(out, strategy.plan(gather_lengths(out), forward=True), masks=("response_mask",))
    return found, float((out["log_probs"] - again["log_probs"]).abs().max())


@pytest.mark.parametrize(
    ("pp", "freq"), [(1, 2), pytest.param(2, [0, 1, 1, 0], marks=pytest.mark.slow, id="stages of another pattern")]
)
def test_layers_without_rope_are_not_rotated_by_our_core_either(pp: int, freq: Any) -> None:
    target = HERE + "log_probs_without_rotation"
    (expected, by_recompute), *_ = run_ranks(1, target, ("model", 1, freq))
    found, by_cache = run_ranks(pp, target, ("core", pp, freq))[0]
    assert float((found - expected).abs().max()) < 1e-4
    assert max(by_recompute, by_cache) < 1e-4


def noisy_routers(_: None) -> dict[str, str]:
    from dataclasses import replace

    from roll_batching.strategy import MegatronTrainStrategy
    from tests.strategy.test_expert_parts import _experts
    from tests.strategy.test_from_parts import _batching, _start
    from tests.support.own_model import build

    _start()
    cases = {"jitter": {"moe_input_jitter_eps": 0.1}, "sinkhorn": {"moe_router_load_balancing_type": "sinkhorn"}}
    found = {name: refusal(build("packed", **_experts(**options))) for name, options in cases.items()}
    for name, options in cases.items():
        parts = build("packed", **_experts(**options))
        MegatronTrainStrategy.from_parts(*parts, replace(_batching("packed"), logprob_plan="none"))
        found[f"{name}, no log-prob pass"] = "nothing"
    return found


def test_routers_that_choose_otherwise_in_training_are_refused_where_log_probs_share_its_plan() -> None:
    found = run_ranks(1, HERE + "noisy_routers")[0]
    assert "moe_input_jitter_eps=0.1" in found["jitter"] and "logprob_plan" in found["jitter"]
    assert "sinkhorn" in found["sinkhorn"] and "logprob_plan" in found["sinkhorn"]
    assert found["jitter, no log-prob pass"] == found["sinkhorn, no log-prob pass"] == "nothing"


def generated(_: None) -> dict[str, Any]:
    from roll_batching.errors import RollBatchingError
    from roll_batching.samples import SampleBatch, gather_lengths
    from roll_batching.strategy import GenerationSettings
    from tests.strategy.test_from_parts import _start
    from tests.support.own_model import build

    _start()
    rows = [torch.arange(1, 4 + 2 * i) for i in range(3)]
    prompts = SampleBatch.from_lists({"input_ids": rows}, {"input_ids": "token"})
    settings = GenerationSettings(max_new_tokens=6, eos_token_id=60, greedy=True)

    def attempt(parts: Any, mode: str = "packed", **options: Any) -> Any:
        strategy = _adopt(parts, mode, **options)
        try:
            out = strategy.generate(prompts, settings)
        except RollBatchingError as error:
            return str(error)
        return [row.tolist() for row in out.to_lists("input_ids")]

    windowed = {"attention": "tests.support.own_attention:MaskedSoftmax", "rotate": "core"}

    def forward(window: tuple[int, int]) -> str:
        strategy = _adopt(build("packed", window_size=window, **windowed))
        try:
            strategy.compute_log_probs(prompts, strategy.plan(gather_lengths(prompts), forward=True))
        except RollBatchingError as error:
            return str(error)
        return "nothing"

    return {
        "core": attempt(build("packed", rotate="core")),
        "model": attempt(build("packed", rotate="model")),
        "model, deferred": attempt(build("packed", rotate="model"), defer_head=True),
        "rows": attempt(build("stock"), "padded", rows_form=True),
        "window": attempt(build("packed", window_size=(9, 0), **windowed)),
        "wide window": attempt(build("packed", window_size=(15, 0), **windowed)),
        "no window": attempt(build("packed", window_size=(-1, 0), **windowed)),
        "forward, window": forward((4, 0)),
        "forward, wide window": forward((6, 0)),
    }


def test_models_that_are_handed_over_generate_as_built_ones_or_say_why_not() -> None:
    found = run_ranks(1, HERE + "generated")[0]
    assert isinstance(found["core"], list)
    assert found["model"] == found["model, deferred"] == found["core"]
    assert "rows_form" in found["rows"] and "generate" in found["rows"]
    assert "13 tokens" in found["window"] and "10" in found["window"]
    assert isinstance(found["wide window"], list) and found["no window"] == found["wide window"]
    assert "7 tokens" in found["forward, window"] and found["forward, wide window"] == "nothing"


def mismatched_alone(shape: str) -> str:
    """What a rank hears where the last one's responses cannot be exchanged."""
    import torch.distributed as dist

    from roll_batching.errors import RollBatchingError
    from roll_batching.losses import mismatched
    from tests.strategy.test_from_parts import _start
    from tests.support.models import random_batch

    _start()
    batch = random_batch(3, 6, 20)
    prompt = torch.arange(batch.num_tokens) - batch.offsets[:-1].repeat_interleave(batch.lengths) > 0
    batch = batch.with_fields({"response_mask": prompt}, {"response_mask": "token"}).select(
        (batch.lengths > 1).nonzero()[:, 0]
    )
    if dist.get_rank():
        batch = batch.select([0]) if shape == "one sample" else batch.without(["response_mask"])
    try:
        mismatched(batch)
    except RollBatchingError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("shape", ["one sample", "no mask"])
def test_responses_that_one_rank_cannot_exchange_are_an_error_on_all(shape: str) -> None:
    texts = set(run_ranks(2, HERE + "mismatched_alone", shape, timeout=60))
    assert len(texts) == 1 and "rank 1: DataError" in texts.pop()


def weighted(_: None) -> dict[str, str]:
    import torch.distributed as dist

    from roll_batching.errors import RollBatchingError
    from roll_batching.losses import PolicyLoss
    from roll_batching.samples import distribute, gather_lengths
    from tests.strategy.test_from_parts import _batch, _start
    from tests.support.own_model import build

    _start()
    strategy = _adopt(build("packed", rotate="core"))
    whole = _batch()
    found = {}
    for name, value in {"negative": -1.0, "nan": float("nan"), "infinite": float("inf"), "fine": 0.0}.items():
        weights = torch.ones(len(whole))
        weights[3] = value  # on rank 1
        batch = whole.with_fields({"weights": weights}, {"weights": "sample"})
        local = batch.select(torch.arange(dist.get_rank(), len(batch), 2))
        plan = strategy.plan(gather_lengths(local))
        loss = PolicyLoss(sample_weights="weights")
        for what in ("train_step", "count"):
            try:
                if what == "count":
                    strategy.count(local, loss)
                else:
                    strategy.train_step(distribute(local, plan), plan, loss)
                found[f"{what} {name}"] = "nothing"
            except RollBatchingError as error:
                found[f"{what} {name}"] = str(error)
    return found


def test_sample_weights_below_zero_are_an_error_on_all_ranks() -> None:
    one, other = run_ranks(2, HERE + "weighted")
    assert one == other
    assert one.pop("train_step fine") == one.pop("count fine") == "nothing"
    for name, text in one.items():
        assert "sample 1021" in text and "'weights'" in text, (name, text)
