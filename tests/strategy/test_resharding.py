"""A second layout on the same ranks: groups of its own, weights resharded in buckets, samples that cross over."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.models import ARCHITECTURE, random_batch
from tests.support.ranks import meet, part, run_ranks

KEYS = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "sp": "sequence_parallel",
    "first": "num_layers_in_first_pipeline_stage",
    "pattern": "pipeline_model_parallel_layout",
}
CAP = 96
DEEP = {**ARCHITECTURE, "num_layers": 4}


def _megatron(sizes: dict[str, Any]) -> dict[str, Any]:
    return {KEYS[name]: value for name, value in sizes.items()}


def _strategies(options: dict[str, Any]) -> tuple[Any, Any]:
    """The one that trains, with known weights, and the other, whose parameters are NaN."""
    from roll_batching.strategy import MegatronInferStrategy, MegatronTrainStrategy
    from tests.support.models import fill, worker_config

    architecture = {**DEEP, **options.get("architecture", {})}

    def config(sizes: dict[str, Any]) -> Any:
        return worker_config("packed", CAP, architecture=architecture, megatron=_megatron(sizes))

    policy = MegatronTrainStrategy(config(options["train"]))
    policy.initialize()
    fill(policy.chunks, 61, policy.layout.tp_rank, policy.layout.tp_size)
    other = MegatronInferStrategy(config(options["other"]), seed=5)
    drawing = torch.get_rng_state()
    other.initialize()
    if other.state.pg_collection is not None:  # ranks of the policy go on drawing what they would have
        assert torch.equal(drawing, torch.get_rng_state())
    with torch.no_grad():
        for chunk in other.chunks:
            for parameter in chunk.parameters():
                parameter.fill_(float("nan"))
    return policy, other


def _weights(strategy: Any) -> dict[str, torch.Tensor]:
    return {
        f"{i}.{name}": parameter.detach().clone()
        for i, chunk in enumerate(strategy.chunks)
        for name, parameter in chunk.named_parameters()
    }


def _crossed(policy: Any, other: Any, whole: Any) -> tuple[Any, Any]:
    """Log-probs of the policy's local samples, computed by either."""
    from roll_batching.jobs.steps.passes import log_prob_pass
    from roll_batching.strategy.roles import run_on

    home = whole.select(torch.arange(policy.layout.dp_rank, len(whole), policy.layout.dp_size))
    ours = run_on(policy, home, log_prob_pass(policy, None))
    theirs = run_on(other, home, log_prob_pass(other, None), policy)
    return ours["log_probs"], theirs["log_probs"]


def copied(options: dict[str, Any]) -> dict[str, Any]:
    """What came over: parameters that differ from the known ones, largest difference of log-probs, the transfer."""
    from tests.support.models import fill

    policy, other = _strategies(options)
    took = other.copy_weights_from(policy)
    came = _weights(other)
    fill(other.chunks, 61, other.layout.tp_rank, other.layout.tp_size)
    known = _weights(other)
    pads = {name for name in known if "word_embeddings" in name or "output_layer" in name}
    differing = [name for name in known if not torch.equal(came[name], known[name]) and name not in pads]
    for name in pads:
        real = known[name] != 3.0
        if not torch.equal(came[name][real], known[name][real]) or came[name].isnan().any():
            differing.append(name)
    other.copy_weights_from(policy)  # again, by the way that is known
    ours, theirs = _crossed(policy, other, random_batch(3, 11, 40))
    return {
        "differing": differing,
        "gap": float((ours - theirs).abs().max()) if len(ours) else 0.0,
        "size": float(ours.abs().max()) if len(ours) else 0.0,
        "took": took,
    }


def all_copied(pairs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`copied` for one pair of layouts after the other, by the same processes."""

    found = []
    for index, options in enumerate(pairs):
        meet(index)
        found.append(copied(options))
        part()
    return found


EXPERTS = {"moe": {"num_experts": 4, "router_topk": 2, "ffn_hidden_size": 24}}
TIED = {"tie_word_embeddings": True}
PAIRS: list[dict[str, Any]] = [
    {"train": {"tp": 2}, "other": {"pp": 2}},
    {"train": {"tp": 2}, "other": {"tp": 4, "sp": True}, "architecture": {"num_query_groups": 4}},
    {"train": {"tp": 2, "sp": True, "pp": 2}, "other": {}, "architecture": TIED},
    {"train": {}, "other": {"tp": 2, "sp": True, "pp": 2}, "architecture": TIED},
    {"train": {"pp": 4}, "other": {"cp": 2, "tp": 2}},
    {"train": {"pp": 2, "vpp": 2, "tp": 2}, "other": {"pp": 2}},
    {"train": {"pp": 2}, "other": {"pp": 2, "vpp": 2}, "architecture": TIED},
    {"train": {"pp": 2, "first": 1}, "other": {"pp": 2}},
    {"train": {"pp": 2, "pattern": "Ettt|tL"}, "other": {"pp": 4}, "architecture": TIED},
    {"train": {"pp": 2, "pattern": "Et|t|t|tL"}, "other": {"pp": 2, "first": 3, "tp": 2}},
    {"train": {"tp": 2}, "other": {"pp": 2, "pattern": "E|tt|t|tL"}},
    {"train": {"ep": 2, "tp": 2, "sp": True}, "other": {"ep": 4}, "architecture": EXPERTS},
    {"train": {"ep": 4}, "other": {"pp": 2, "tp": 2, "sp": True}, "architecture": EXPERTS},
    {"train": {"tp": 4, "sp": True}, "other": {"pp": 2}, "architecture": {"num_query_groups": 2}},
    {"train": {"pp": 2}, "other": {"tp": 4}, "architecture": {"num_query_groups": 2, "qk_layernorm": True}},
    {"train": {"tp": 2, "pp": 2}, "other": {"tp": 4, "sp": True}, "architecture": {"num_query_groups": 1}},
]
"""Four processes each; the vocabulary of 61 is padded to 61, 62 or 64 rows."""


@pytest.mark.layouts
def test_weights_and_log_probs_are_those_of_one_layout() -> None:
    everyone = run_ranks(4, "tests.strategy.test_resharding:all_copied", PAIRS, timeout=900)
    for options, found in zip(PAIRS, zip(*everyone, strict=True), strict=True):
        for one in found:
            assert one["differing"] == [], options
            assert one["size"] > 1 and one["gap"] < 2e-5, (options, one)
            assert one["took"].bytes > 0 or one["took"].buckets, options


class Live(TorchDispatchMode):
    """The most bytes that tensors made inside hold at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        given = {a.untyped_storage()._cdata for a in args if isinstance(a, torch.Tensor)}
        if isinstance(found, torch.Tensor) and found.untyped_storage()._cdata not in given | self._known:
            storage = found.untyped_storage()
            self._known.add(storage._cdata)
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        return found

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


BUCKET = 8 * 1024


def bounded(_: None) -> tuple[Any, int, list[str]]:
    from roll_batching.strategy.resharding import Resharding
    from tests.support.models import fill

    policy, other = _strategies({"train": {"tp": 2}, "other": {"pp": 2}})
    way = Resharding(policy.state, other.state, other.layout.host_group, BUCKET)
    with Live() as live:
        took = way.copy()
    came = _weights(other)
    fill(other.chunks, 61, other.layout.tp_rank, other.layout.tp_size)
    return took, live.peak, [name for name, known in _weights(other).items() if not torch.equal(came[name], known)]


def test_a_copy_holds_two_buckets_at_most(report: Any) -> None:
    for took, peak, differing in run_ranks(2, "tests.strategy.test_resharding:bounded"):
        assert differing == []
        assert took.buckets > 2 and took.largest <= BUCKET < took.bytes
        assert took.largest <= peak <= 2 * BUCKET + 1024
        report(
            f"{took.bytes:,} bytes came in {took.buckets} buckets of {BUCKET:,} at most; at a time {peak:,} bytes held"
        )
