"""Sampling: the cache is exact, recorded log-probs are those of a packed forward pass, seeds are honoured."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.ranks import run_ranks


def _strategy(dtype: str, megatron: Any = None, moe: bool = False, layers: int = 2, **options: Any) -> Any:
    from roll_batching.strategy import MegatronTrainStrategy
    from tests.support.models import ARCHITECTURE, fill, worker_config

    experts = {"moe": {"num_experts": 4, "router_topk": 2, "ffn_hidden_size": 24}} if moe else {}
    architecture = {**ARCHITECTURE, **experts, "num_layers": layers}
    config = worker_config("packed", 256, dtype=dtype, megatron=megatron, architecture=architecture)
    strategy = MegatronTrainStrategy(config, **options)
    strategy.initialize()
    fill(strategy.chunks, 61, strategy.layout.tp_rank, strategy.layout.tp_size)
    return strategy


def _prompts(count: int = 7) -> Any:
    from roll_batching.samples import SampleBatch

    g = torch.Generator().manual_seed(3)
    rows = [torch.randint(0, 61, (1 + 3 * i,), generator=g) for i in range(count)]
    return SampleBatch.from_lists({"input_ids": rows}, {"input_ids": "token"})


def greedy_against_recompute(dtype: str) -> tuple[list[list[int]], list[list[int]]]:
    from roll_batching.modeling.head import gpt_of, logits_at
    from roll_batching.packing import PackLayout, packed_params
    from roll_batching.samples import SampleBatch, gather_lengths
    from roll_batching.strategy import GenerationSettings

    strategy = _strategy(dtype)
    prompts = _prompts()
    settings = GenerationSettings(max_new_tokens=24, eos_token_id=5, greedy=True)
    out = strategy.generate(prompts, settings)
    found = [row.tolist() for row in out.to_lists("input_ids")]
    expected = []
    chunk = strategy.chunks[0].eval()
    for row in prompts.to_lists("input_ids"):
        tokens = row.tolist()
        for _ in range(24):
            one = SampleBatch.from_lists({"input_ids": [tokens]}, {"input_ids": "token"})
            mb = strategy.plan(gather_lengths(one), forward=True).micro_batches[0][0]
            params = packed_params(PackLayout.of(mb), 0, torch.device("cpu"))
            with torch.no_grad():
                output = chunk(torch.tensor([tokens]), params.positions[None], None, packed_seq_params=params)
                logits = logits_at(output, torch.tensor([len(tokens) - 1]), gpt_of(chunk))
            tokens = [*tokens, int(logits[0, :61].argmax())]
            if tokens[-1] == 5:
                break
        expected.append(tokens)
    return found, expected


def recorded_against_packed(payload: tuple[str, float]) -> float:
    from roll_batching.samples import gather_lengths
    from roll_batching.strategy import GenerationSettings

    dtype, temperature = payload
    strategy = _strategy(dtype, temperature=temperature)
    settings = GenerationSettings(
        max_new_tokens=40, eos_token_id=5, temperature=temperature, seed=11, num_return_sequences=4
    )
    out = strategy.generate(_prompts(), settings)
    assert strategy.generate(_prompts().select([]), settings).describe() == out.describe()  # so that they can be joined
    plan = strategy.plan(gather_lengths(out), forward=True)
    again = strategy.compute_log_probs(out, plan, masks=("response_mask",))
    assert out["response_mask"].sum() > 100
    counted = (out["log_probs"] != 0) | (again["log_probs"] != 0)
    assert int(counted.sum()) == int(out["response_mask"].sum())
    return float((out["log_probs"] - again["log_probs"]).abs().max())


def sampling_rules(_: None) -> None:
    from roll_batching.strategy import GenerationSettings
    from roll_batching.strategy.sampling import Sampler, uniform_draws

    strategy = _strategy("fp32")
    prompts = _prompts(3)

    def sample(**settings: Any) -> list[list[int]]:
        out = strategy.generate(prompts, GenerationSettings(max_new_tokens=12, eos_token_id=5, **settings))
        return [row.tolist() for row in out.to_lists("input_ids")]

    assert sample(seed=1, num_return_sequences=2) == sample(seed=1, num_return_sequences=2)
    assert sample(seed=1) != sample(seed=2)
    assert sample(seed=1, top_k=1) == sample(greedy=True)
    assert sample(seed=1, top_p=1e-6) == sample(greedy=True)
    out = strategy.generate(prompts, GenerationSettings(max_new_tokens=12, eos_token_id=5, num_return_sequences=3))
    assert len(out) == 9
    for i, row in enumerate(out.to_lists("input_ids")):
        prompt = prompts.to_lists("input_ids")[i // 3]
        assert row[: len(prompt)].tolist() == prompt.tolist()
        response = row[len(prompt) :].tolist()
        assert 5 not in response[:-1] and (response[-1] == 5 or len(response) == 12)
        assert max(response) < 61
    # Any stop token ends a response: the tokens are those of a response that goes on, up to the first one.
    whole = sample(greedy=True)
    stops = tuple(row[-3] for row in whole[:2])
    for row, cut, prompt in zip(
        whole, sample(greedy=True, stop_token_ids=stops), prompts.to_lists("input_ids"), strict=True
    ):
        ends = [at for at in range(len(prompt), len(row)) if row[at] in stops]
        assert cut == (row[: ends[0] + 1] if ends else row)
        assert row is whole[2] or len(cut) < len(row)
    # Beyond the vocabulary lies padding. What is left out is never drawn, and log-probs are of the whole distribution.
    count, cpu = 4000, torch.device("cpu")
    shares = torch.tensor([0.5, 0.25, 0.15, 0.1])
    logits = torch.cat([shares.log(), torch.tensor([99.0])]).repeat(count, 1)
    for limits, kept in (({"top_k": 2}, 2), ({"top_p": 0.8}, 3), ({"top_p": 0.7}, 2), ({"top_k": 9}, 4)):
        limited = GenerationSettings(max_new_tokens=2, eos_token_id=0, **limits)
        sampler = Sampler(limited, 4, uniform_draws(limited, count, dp_rank=0, device=cpu, dtype=torch.float32))
        drawn = [sampler(logits, torch.arange(count), step) for step in range(2)]
        for tokens, log_probs in drawn:
            assert set(tokens.tolist()) == set(range(kept))
            assert torch.allclose(log_probs, shares.log()[tokens])
            seen = torch.bincount(tokens, minlength=4) / count
            assert (seen[:kept] - shares[:kept] / shares[:kept].sum()).abs().max() < 0.03
        both = [tokens == 0 for tokens, _ in drawn]  # independent from step to step
        assert abs(float((both[0] & both[1]).float().mean() - both[0].float().mean() * both[1].float().mean())) < 0.02
    empty = strategy.generate(prompts.select([]), GenerationSettings(max_new_tokens=4, eos_token_id=5))
    assert len(empty) == 0


def greedy_in_layout(payload: tuple[dict[str, Any], bool]) -> tuple[list[list[int]], float]:
    """(this rank's sequences, gap of their log-probs to a packed forward); ranks of one replica agree."""
    from roll_batching.samples import distribute, gather_lengths, number_globally
    from roll_batching.strategy import GenerationSettings

    strategy = _strategy("fp64", *payload)
    prompts = _prompts()
    dp = strategy.layout
    # Uneven on purpose: with two data-parallel ranks the second has one prompt, or none at all.
    mine = prompts if dp.dp_size == 1 else prompts.select([0, 1, 2, 3, 4, 5] if dp.dp_rank == 0 else [6])
    out = strategy.generate(mine, GenerationSettings(max_new_tokens=16, eos_token_id=5, greedy=True))
    numbered = number_globally(out)
    plan = strategy.plan(gather_lengths(numbered), forward=True)
    again = strategy.compute_log_probs(distribute(numbered, plan), plan, masks=("response_mask",))
    recorded = distribute(numbered, plan)["log_probs"]
    return [row.tolist() for row in out.to_lists("input_ids")], float((recorded - again["log_probs"]).abs().max())


LAYOUTS = {
    "tp2": {"tensor_model_parallel_size": 2},
    "tp2 sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
    "dp2": {},
}


@pytest.mark.layouts
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_generate_the_same(name: str) -> None:
    target = "tests.strategy.test_generation:greedy_in_layout"
    (alone, _), *_ = run_ranks(1, target, ({}, False))
    ranks = run_ranks(2, target, (LAYOUTS[name], False))
    assert max(gap for _, gap in ranks) < 1e-10
    if name == "dp2":
        assert ranks[0][0] + ranks[1][0] == alone
    else:
        assert ranks[0][0] == ranks[1][0] == alone


def in_waves(payload: tuple[dict[str, Any], bool]) -> tuple[list[list[int]], float, int, int, int]:
    """Beside a run with all rows at once: (tokens of this rank, their log-probs' gap, positions in the cache at most,
    rows of logits at most, how often the cache was looked at)."""
    from roll_batching.modeling import decode
    from roll_batching.strategy import GenerationSettings, decoding, generation

    strategy = _strategy("fp64", *payload)
    place, prompts = strategy.layout, _prompts()
    mine = prompts if place.dp_size == 1 else prompts.select([0, 1, 2, 3, 4, 5] if place.dp_rank == 0 else [6])
    caches: list[Any] = []
    logits: list[int] = []
    whole, cache = generation.gather_vocabulary, decode.KeyValueCache

    class Watched(cache):  # type: ignore[misc, valid-type]
        def buffers(self, layer: int, keys: Any, values: Any) -> Any:
            found = super().buffers(layer, keys, values)
            caches.append(found[0].shape[0] * self.length)
            return found

        def select(self, rows: Any) -> None:
            super().select(rows)
            caches.append(len(rows) * self.length)

    def counted(part: torch.Tensor, gpt: Any) -> torch.Tensor:
        logits.append(len(part))
        return whole(part, gpt)

    generation.KeyValueCache = Watched  # type: ignore[misc]
    generation.gather_vocabulary = decoding.gather_vocabulary = counted
    widths: set[int] = set()
    strategy.chunks[0].register_forward_hook(lambda module, inputs, output: widths.add(output.shape[-1]))
    runs = []
    for bound in (None, 120):
        caches.clear()
        settings = GenerationSettings(
            max_new_tokens=16, eos_token_id=5, seed=4, num_return_sequences=3, max_tokens_in_cache=bound
        )
        runs.append(strategy.generate(mine, settings))
    alone, waves = ([row.tolist() for row in out.to_lists("input_ids")] for out in runs)
    assert alone == waves and len(set(map(tuple, alone))) > len(mine)
    gap = float((runs[0]["log_probs"] - runs[1]["log_probs"]).abs().max()) if len(mine) else 0.0
    assert widths <= {32}, "hidden states leave the model, and the head takes the positions that are asked for"
    return alone, gap, max(caches, default=0), max(logits, default=0), len(caches)


@pytest.mark.layouts
@pytest.mark.parametrize("name", ["one", "tp2", "tp2 sp", "pp2", "dp2", "ep2"])
def test_a_bounded_cache_samples_the_same_in_waves(name: str) -> None:
    layout = {"one": {}, "ep2": {"expert_model_parallel_size": 2}, **LAYOUTS}[name]
    target, experts = "tests.strategy.test_generation:in_waves", name == "ep2"
    ranks = run_ranks(1 if name == "one" else 2, target, (layout, experts))
    for _, gap, cache, logits, times in ranks:
        assert gap < 1e-10
        assert cache <= 120 and (times == 0) == (name == "pp2")
        assert logits <= 7 * 3  # no prompt's inner positions
    if name in ("tp2", "tp2 sp", "pp2"):
        assert ranks[0][0] == ranks[1][0]


def test_a_cache_without_room_for_one_row_is_refused() -> None:
    for message in run_ranks(2, "tests.strategy.test_generation:no_room"):
        assert "max_tokens_in_cache=30" in message and "need 35" in message


def test_no_wave_is_empty_for_want_of_room() -> None:
    from roll_batching.errors import DataError
    from roll_batching.planning import ParallelDims
    from roll_batching.strategy.decoding import split_by_cache_limit

    assert split_by_cache_limit([3, 5, 2], 6, ParallelDims()) == [[1], [0, 2]]
    with pytest.raises(DataError, match="max_tokens_in_cache=4 has no room for a row of 5 positions"):
        split_by_cache_limit([3, 5, 2], 4, ParallelDims())


def no_room(_: None) -> str:
    from roll_batching.errors import RankError
    from roll_batching.strategy import GenerationSettings

    strategy = _strategy("fp32")
    mine = _prompts().select([0] if strategy.layout.dp_rank == 0 else [6])  # one token; nineteen
    with pytest.raises(RankError) as caught:
        strategy.generate(mine, GenerationSettings(max_new_tokens=16, eos_token_id=5, max_tokens_in_cache=30))
    return str(caught.value)


def refused(megatron: dict[str, Any]) -> str:
    from roll_batching.errors import LayoutError
    from roll_batching.strategy import GenerationSettings

    strategy = _strategy("fp32", megatron, layers=4)
    with pytest.raises(LayoutError) as caught:
        strategy.generate(_prompts(), GenerationSettings(max_new_tokens=4, eos_token_id=5))
    return str(caught.value)


@pytest.mark.layouts
def test_generation_under_context_parallelism_and_virtual_stages_is_refused_by_name() -> None:
    target = "tests.strategy.test_generation:refused"
    for message in run_ranks(2, target, {"context_parallel_size": 2}):
        assert "context parallel size 2" in message and "engine" in message
    virtual = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    for message in run_ranks(2, target, virtual):
        assert "virtual pipeline 2" in message and "engine" in message


@pytest.mark.layouts
def test_ranks_that_share_experts_generate_in_lockstep() -> None:
    target = "tests.strategy.test_generation:greedy_in_layout"
    (alone, _), *_ = run_ranks(1, target, ({}, True))
    ranks = run_ranks(2, target, ({"expert_model_parallel_size": 2}, True))
    assert max(gap for _, gap in ranks) < 1e-10
    assert ranks[0][0] + ranks[1][0] == alone


@pytest.mark.parametrize("dtype", ["fp64", "fp32"])
def test_greedy_decoding_equals_full_recompute(dtype: str) -> None:
    found, expected = run_ranks(1, "tests.strategy.test_generation:greedy_against_recompute", dtype)[0]
    assert found == expected
    assert len(set(map(len, found))) > 3


@pytest.mark.parametrize(("dtype", "limit"), [("fp64", 1e-10), ("fp32", 1e-4)])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_recorded_log_probs_equal_a_packed_forward(dtype: str, limit: float, temperature: float) -> None:
    gap = run_ranks(1, "tests.strategy.test_generation:recorded_against_packed", (dtype, temperature))[0]
    assert gap < limit


def test_sampling_rules() -> None:
    run_ranks(1, "tests.strategy.test_generation:sampling_rules")


def of_unsteady_sums(megatron: dict[str, Any]) -> list[list[Any]]:
    """Tokens and log-probs that this rank sampled, where running sums differ between ranks."""
    import torch.distributed as dist

    from roll_batching.strategy import GenerationSettings

    strategy = _strategy("fp32", megatron=megatron)
    summed = torch.Tensor.cumsum

    def cumsum(values: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        result = summed(values, *args, **options)
        if not result.is_floating_point():
            return result
        return result * torch.linspace(1, 1 + 0.5 * dist.get_rank(), result.shape[-1])

    torch.Tensor.cumsum = cumsum  # type: ignore[method-assign]
    out = strategy.generate(_prompts(3), GenerationSettings(max_new_tokens=12, eos_token_id=5, seed=2, top_p=0.9))
    again = strategy.compute_log_probs(out, strategy.plan(gather(out), forward=True), masks=("response_mask",))
    assert torch.allclose(out["log_probs"], again["log_probs"], atol=1e-4)
    return [[row.tolist() for row in out.to_lists(name)] for name in ("input_ids", "log_probs")]


def gather(batch: Any) -> Any:
    from roll_batching.samples import gather_lengths

    return gather_lengths(batch)


@pytest.mark.parametrize(
    "megatron",
    [
        {"tensor_model_parallel_size": 2},
        pytest.param({"pipeline_model_parallel_size": 2}, marks=pytest.mark.slow),
    ],
)
def test_ranks_of_a_replica_take_the_same_tokens(megatron: dict[str, Any]) -> None:
    one, other = run_ranks(2, "tests.strategy.test_generation:of_unsteady_sums", megatron)
    assert one == other
