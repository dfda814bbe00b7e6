"""A sampler in another parallel layout: the responses of the model in training, on the same ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.strategy.test_resharding import DEEP, EXPERTS, _megatron
from tests.support.ranks import meet, part, run_ranks

HERE = "tests.jobs.roles.test_layout_sampler:"
PROMPTS, GROUP, TOKENS = 5, 2, 12


def _worker(sizes: dict[str, Any], options: dict[str, Any]) -> Any:
    from tests.support.models import worker_config

    architecture = {**DEEP, **options.get("architecture", {})}
    return worker_config("packed", 256, dtype="fp64", architecture=architecture, megatron=_megatron(sizes))


def _models(options: dict[str, Any]) -> tuple[Any, Any, list[Any]]:
    """What trains, what answers in its own way, and the samplers beside it."""
    from roll_batching.jobs.roles.layout_sampler import LayoutSampler
    from roll_batching.strategy import MegatronTrainStrategy
    from tests.support.models import fill

    policy = MegatronTrainStrategy(_worker(options["train"], options), seed=7)
    policy.initialize()
    fill(policy.chunks, 61, policy.layout.tp_rank, policy.layout.tp_size)
    samplers = [LayoutSampler(_worker(sizes, options), policy, releases_memory=True) for sizes in options["infer"]]
    # Where the policy cannot generate, one sampler's answers are compared with another's.
    alone = policy.layout.cp_size > 1 or policy.layout.vpp_size > 1
    return policy, samplers[0] if alone else policy, samplers


def _prompts(policy: Any) -> Any:
    """This replica's prompts, the first replica having most and the last one of four none."""
    from roll_batching.samples import SampleBatch

    g = torch.Generator().manual_seed(3)
    rows = [torch.randint(0, 61, (2 + 3 * i,), generator=g) for i in range(PROMPTS)]
    every = SampleBatch.from_lists({"input_ids": rows}, {"input_ids": "token"})
    here = [i for i in (4, 0, 3, 1, 2) if min(i // 2, policy.layout.dp_size - 1) == policy.layout.dp_rank]
    return every.select(here)


def _held(sampler: Any) -> int:
    return sum(p.untyped_storage().nbytes() for chunk in sampler.model.chunks for p in chunk.parameters())


def _differences(found: Any, wanted: Any) -> list[str]:
    """In what two batches of answers are not one; log-probs may differ by what fp64 rounds."""
    same = {
        "ids": torch.equal(found.ids, wanted.ids),
        "tokens": torch.equal(found["input_ids"], wanted["input_ids"]),
        "mask": torch.equal(found["response_mask"], wanted["response_mask"]),
        "log_probs": torch.allclose(found["log_probs"], wanted["log_probs"], rtol=0, atol=1e-12),
    }
    return [name for name, alike in same.items() if not alike]


def _compared(policy: Any, expected: Any, samplers: list[Any]) -> dict[str, Any]:
    """How the samplers' answers differ, drawn and greedy, before and after the weights change; what it took."""
    from roll_batching.strategy import GenerationSettings

    prompts, differing, texts = _prompts(policy), [], []
    settings = GenerationSettings(
        max_new_tokens=TOKENS, eos_token_id=5, num_return_sequences=GROUP, seed=4, max_tokens_in_cache=64
    )
    greedy = GenerationSettings(max_new_tokens=TOKENS, eos_token_id=5, greedy=True)
    for version in range(2):
        for sampler in samplers:
            assert _held(sampler) == 0
            sampler.update(version)
            assert _held(sampler) > 0
        for asked in (settings, greedy):
            wanted = expected.generate(prompts, asked)
            texts.append(wanted["input_ids"].tolist())
            for number, sampler in enumerate(samplers):
                found = sampler.generate(prompts, asked)
                differing += [(number, version, *_differences(found, wanted))] if _differences(found, wanted) else []
        for sampler in samplers:
            sampler.release_memory()
        with torch.no_grad():
            for chunk in policy.chunks:
                for parameter in chunk.parameters():
                    parameter.mul_(1.1)
    row = samplers[-1].metrics(prompts)
    assert row["weights_seconds"] > 0 and samplers[-1].metrics(prompts) == {"weights_seconds": 0.0, "weights_bytes": 0}
    return {"differing": differing, "texts": texts, "bytes": row["weights_bytes"]}


def all_sampled(pairs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`_compared` for one pair of layouts after the other, by the same processes."""

    found = []
    for index, options in enumerate(pairs):
        meet(index)
        found.append(_compared(*_models(options)))
        part()
    return found


def _check(found: dict[str, Any]) -> None:
    assert found["differing"] == []
    drawn, greedy, drawn_after, greedy_after = found["texts"]
    assert not drawn or (drawn != drawn_after and greedy != greedy_after), "the weights changed"


def _refused(policy: Any, sampler: Any) -> list[str]:
    """What this rank hears when rank 1 alone has no room, for the weights and for those on their way."""
    from roll_batching.errors import DeviceMemoryError, RankError
    from roll_batching.strategy.resharding import Resharding

    heard, full = [], policy.layout.tp_rank == 1

    def no_room(*args: Any, **kwargs: Any) -> Any:
        raise DeviceMemoryError("no room on this rank")

    for place, name in ((sampler.model, "load_states"), (Resharding, "_bucket_sizes")):
        kept = getattr(place, name)
        if full:
            setattr(place, name, no_room)
        try:
            sampler.update(2)
        except RankError as error:
            heard.append(str(error))
        finally:
            setattr(place, name, kept)
    sampler.update(2)  # and goes on once there is room
    return heard


def sampled_and_refused(options: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """`_compared`, then what this rank hears of another that has no room."""
    policy, expected, samplers = _models(options)
    return _compared(policy, expected, samplers), _refused(policy, samplers[0])


def test_answers_and_their_log_probs_are_those_of_the_model_in_training(report: Any) -> None:
    """TP 2 that samples as two replicas. A rank without room for the weights ends all."""
    everyone = run_ranks(2, HERE + "sampled_and_refused", {"train": {"tp": 2}, "infer": [{}]})
    for found, _ in everyone:
        _check(found)
        assert found["bytes"] == everyone[0][0]["bytes"] > 0
    report(f"weights between two ranks, twice: {everyone[0][0]['bytes']:,} bytes")
    heard = everyone[0][1]
    assert heard == everyone[1][1] and len(heard) == 2
    assert all("rank 1" in said and "no room on this rank" in said for said in heard)
    report(heard[0])


PAIRS: list[dict[str, Any]] = [
    {"train": {"tp": 2}, "infer": [{"pp": 2}]},
    {"train": {}, "infer": [{"tp": 2, "sp": True}, {"tp": 2}]},
    {"train": {"pp": 2}, "infer": [{"tp": 2}, {}]},
    {"train": {"tp": 2, "sp": True}, "infer": [{"tp": 2}]},
    {"train": {"pp": 2, "vpp": 2}, "infer": [{"pp": 2}, {"tp": 2}]},
    {"train": {"cp": 2, "tp": 2}, "infer": [{}, {"tp": 2, "sp": True}]},
    {"train": {"ep": 2}, "infer": [{"ep": 4}, {"ep": 2, "tp": 2, "sp": True}], "architecture": EXPERTS},
    {"train": {"pp": 2, "tp": 2, "sp": True}, "infer": [{"ep": 4}], "architecture": EXPERTS},
]
"""Four processes each."""


@pytest.mark.slow
@pytest.mark.layouts
def test_answers_are_alike_in_all_layouts() -> None:
    everyone = run_ranks(4, HERE + "all_sampled", PAIRS, timeout=900)
    for options, found in zip(PAIRS, zip(*everyone, strict=True), strict=True):
        for one in found:
            assert one["differing"] == [], (options, one["differing"])
            _check(one)
