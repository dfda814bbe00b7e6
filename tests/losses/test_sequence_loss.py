"""A sequence loss equals the same loss over flat tokens, in every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.losses.steps import CAP, gap, make_strategy, refill, step
from tests.support.models import MODES
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.loss

HERE = "tests.losses.test_sequence_loss:"
LAYOUTS = {
    "one rank": (1, {}),
    "tensor 2": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "context 2": (2, {"context_parallel_size": 2}),
    "pipeline 2": (2, {"pipeline_model_parallel_size": 2}),
    "data 2, micro-batch mean": (2, {"calculate_per_token_loss": False}),
    "tensor 2, context 2": (4, {"tensor_model_parallel_size": 2, "context_parallel_size": 2}),
}


def _token_loss() -> Any:
    from roll_batching.losses import LossOutput, Max, Sum

    class Flat:
        needs, masks = {"log_probs", "entropy"}, ("response_mask",)

        def token_loss(self, tokens: Any) -> Any:
            x = (tokens.log_probs - tokens["old_log_probs"]).exp() * tokens.per_token("advantages") - tokens.entropy
            loss = tokens.mean(x) + 0.3 * tokens.sequence_mean(x) + 0.01 * tokens.sequence_sum(x)
            largest = Max(torch.where(tokens.mask(), x, -1e9).max().detach())
            return LossOutput(loss, {"x": tokens.mean_metric(x), "n": Sum(tokens.mask().sum()), "largest": largest})

    return Flat()


def _sequence_losses() -> dict[str, Any]:
    from roll_batching.losses import LossOutput, Max, Sum, token_log_probs

    class Helpers:
        """By the view's own log-probs and entropy."""

        masks = ("response_mask",)
        statistics = staticmethod(lambda s: (s.log_probs(), s.entropy()))

        def sequence_loss(self, s: Any) -> Any:
            log_probs, entropy = self.statistics(s)
            x = (log_probs - s["old_log_probs"]).exp() * s["advantages"] - entropy
            loss = s.mean(x) + 0.3 * s.sequence_mean(x) + 0.01 * s.sequence_sum(x)
            largest = Max(torch.where(s.mask(), x, -1e9).amax().detach() if len(x) else x.new_full((), -1e9))
            return LossOutput(loss, {"x": s.mean_metric(x), "n": Sum(s.mask().sum()), "largest": largest})

    class Whole(Helpers):
        gather_cp = True

    class FromLogits(Helpers):
        """By the public function, from the sequence's own logits."""

        statistics = staticmethod(
            lambda s: token_log_probs(s.logits, s.labels, vocab_size=61, entropy=True, tp_group=s.tp_group)
        )

    class WholeFromLogits(FromLogits):
        gather_cp = True

    class Plain(Helpers):
        """By log_softmax, where one rank holds the whole vocabulary."""

        @staticmethod
        def statistics(s: Any) -> Any:
            log_p = s.logits.log_softmax(-1)
            return log_p.gather(1, s.labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)

    return {c.__name__: c() for c in (Helpers, Whole, FromLogits, WholeFromLogits, Plain)}


def compare(megatron: dict[str, Any]) -> dict[str, tuple[float, float]]:
    from tests.support.models import random_batch

    found = {}
    batch = random_batch(3, 11, 40)
    for mode in MODES:
        strategy = make_strategy(mode, megatron=megatron)
        expected = step(strategy, batch, _token_loss())
        for name, loss in _sequence_losses().items():
            if name == "Plain" and strategy.layout.tp_size > 1:
                continue
            result = step(strategy, batch, loss)
            found[f"{name} {mode}"] = gap(result, expected)
            for key, value in expected[0].metrics.items():
                assert abs(result[0].metrics[key] - value) < 1e-4 * max(1.0, abs(value)), (name, mode, key)
    return found


SLOW = ("tensor 2, context 2", "tensor 2")


@pytest.mark.parametrize("layout", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in LAYOUTS])
def test_a_sequence_loss_equals_the_token_loss(layout: str, report) -> None:
    ranks, megatron = LAYOUTS[layout]
    for rank in run_ranks(ranks, HERE + "compare", megatron):
        worst = max(rank, key=lambda name: max(rank[name]))
        assert max(rank[worst]) < 1e-5, worst
    report(f"sequence losses, {layout}: worst difference {max(rank[worst]):.1e} ({worst})")


def looks(megatron: dict[str, Any]) -> list[dict[str, Any]]:
    """The contents of every view of a step."""
    from roll_batching.losses import LossOutput
    from tests.support.models import random_batch

    seen = []

    class Look:
        masks = ("response_mask",)

        def sequence_loss(self, s: Any) -> Any:
            seen.append(
                {
                    "id": s.id,
                    "length": s.length,
                    "rows": tuple(s.logits.shape),
                    "positions": s.positions.tolist(),
                    "tokens": s.input_ids.tolist(),
                    "labels": s.labels.tolist(),
                    "mask": s.mask().tolist(),
                    "uncounted": (~s["response_mask"]).tolist(),
                    "count": int(s.count()),
                    "advantage": float(s["advantages"]),
                }
            )
            return LossOutput(s.mean(s.logits.float().sum(-1)))

    strategy = make_strategy(megatron=megatron)
    step(strategy, random_batch(3, 9, 40), Look())
    return seen


@pytest.mark.parametrize("cp_size", [1, 2])
def test_views_hold_the_sequences_unpacked(cp_size: int) -> None:
    from tests.support.models import random_batch

    ranks = run_ranks(cp_size, HERE + "looks", {"context_parallel_size": cp_size})
    batch = random_batch(3, 9, 40)
    by_id = {i: k for k, i in enumerate(batch.ids.tolist())}
    assert all(sorted(view["id"] for view in seen) == sorted(by_id) for seen in ranks)
    for views in zip(*ranks, strict=True):
        row = by_id[views[0]["id"]]
        tokens = batch.to_lists("input_ids")[row].tolist()
        mask = batch.to_lists("response_mask")[row].tolist()
        assert sorted(p for view in views for p in view["positions"]) == list(range(len(tokens)))
        for view in views:
            at = view["positions"]
            assert at == sorted(at) and view["length"] == len(tokens)
            assert view["rows"] == (len(at), 61)
            assert view["tokens"] == [tokens[p] for p in at]
            assert view["labels"] == [tokens[p + 1] if p + 1 < len(tokens) else 0 for p in at]
            assert view["mask"] == [p + 1 < len(tokens) and mask[p + 1] for p in at]
            assert view["uncounted"] == [not counted for counted in view["mask"]]
            assert view["count"] == sum(mask[1:])
            assert view["advantage"] == float(batch["advantages"][row])


def both_methods(_: None) -> str:
    from roll_batching.errors import LossError

    class Both:
        def token_loss(self, tokens: Any) -> Any: ...
        def sequence_loss(self, sequence: Any) -> Any: ...

    from tests.support.models import random_batch

    strategy = make_strategy()
    try:
        step(strategy, random_batch(3, 4, 20), Both())
    except LossError as error:
        return str(error)
    return ""


def test_a_loss_with_both_methods_is_refused() -> None:
    message = run_ranks(1, HERE + "both_methods")[0]
    assert "token_loss and sequence_loss" in message and "exactly one" in message


def split_backward(_: None) -> tuple[int, int]:
    """(bytes allocated at most during a step by sequences, bytes of the pack's logits)."""
    from tests.support.models import random_batch

    strategy = make_strategy(cap=CAP)
    batch = random_batch(3, 4, 20)
    refill(strategy)
    names: list[str] = []

    class Names:
        masks = ("response_mask",)

        def sequence_loss(self, s: Any) -> Any:
            from roll_batching.losses import LossOutput

            names.append(type(s.logits.grad_fn).__name__)
            try:
                s.logits.mul_(2)
            except RuntimeError:
                names.append("refused")
            return LossOutput(s.mean(s.log_probs()))

    step(strategy, batch, Names())
    return len(set(names)), names.count("refused")


def test_sequences_are_cut_by_one_split_and_cannot_be_overwritten() -> None:
    kinds, refused = run_ranks(1, HERE + "split_backward")[0]
    assert kinds == 2 and refused == 4


def on_some_ranks_alone(megatron: dict[str, Any]) -> tuple[float, list[str]]:
    """A loss that reads log-probs on the last rank only, and the errors of losses with undeclared needs."""
    import torch.distributed as dist

    from roll_batching.errors import LossError
    from roll_batching.losses import LossOutput
    from tests.support.models import random_batch

    class OnTheLast:
        masks = ("response_mask",)
        gather_cp = True

        def sequence_loss(self, s: Any) -> Any:
            x = s.logits.float().sum(-1)
            if dist.get_rank() == dist.get_world_size() - 1:
                x = x + 0 * s.log_probs()
            return LossOutput(s.mean(0 * x + 1))

    class OfLogits(OnTheLast):
        needs = {"logits"}

    class OfLogitsAndEntropy(OfLogits):
        def sequence_loss(self, s: Any) -> Any:
            return LossOutput(s.mean(s.entropy()))

    strategy, batch, said = make_strategy(megatron=megatron), random_batch(3, 5, 20), []
    loss = step(strategy, batch, OnTheLast())[0].loss
    for undeclared in (OfLogits(), OfLogitsAndEntropy()):
        try:
            step(strategy, batch, undeclared)
        except LossError as error:
            said.append(str(error))
    return loss, said


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "key", ["context_parallel_size", pytest.param("tensor_model_parallel_size", marks=pytest.mark.slow)]
)
def test_a_loss_may_ask_for_log_probs_on_some_ranks_alone(key: str) -> None:
    (loss, said), other = run_ranks(2, HERE + "on_some_ranks_alone", {key: 2}, timeout=60)
    assert other == (loss, said) and loss == pytest.approx(1)
    assert "log_probs(), which it does not declare: add 'log_probs'" in said[0] and "entropy()" in said[1]
