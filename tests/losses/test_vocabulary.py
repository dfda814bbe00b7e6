"""Operations over a vocabulary in shards: values and gradients of plain torch on whole rows, in every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.losses.steps import gap, make_strategy, step
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.loss

HERE = "tests.losses.test_vocabulary:"


class PlainRows:
    """The operations of `Vocabulary` on whole rows, by torch."""

    sum = staticmethod(lambda x: x.sum(-1))
    max = staticmethod(lambda x: x.amax(-1))
    logsumexp = staticmethod(lambda x: x.logsumexp(-1))
    expand = staticmethod(lambda x: x[:, None])
    rows = staticmethod(lambda x: x)

    @staticmethod
    def gather(x: Any, ids: Any) -> Any:
        return x.gather(1, ids[:, None])[:, 0] if ids.dim() == 1 else x.gather(1, ids)


def entropy_of(v: Any, x: Any, ids: Any) -> Any:
    p = (x - v.expand(v.logsumexp(x))).exp()
    return v.logsumexp(x) - v.sum(p * x)


def of_normalised(v: Any, x: Any, ids: Any) -> Any:
    """A reduced value meets the columns twice."""
    scaled = (x - v.expand(v.max(x))) / v.expand(v.sum(x.abs()))
    return v.logsumexp(3 * scaled) + v.gather(scaled, ids)


FORMULAS = {
    "sum": lambda v, x, ids: v.sum(x.tanh()),
    "maximum": lambda v, x, ids: v.max(x),
    "maximum of equal columns": lambda v, x, ids: v.max(x.clamp(max=0.1)),
    "logsumexp": lambda v, x, ids: v.logsumexp(x),
    "chosen logits": lambda v, x, ids: v.gather(x, ids),
    "several chosen logits": lambda v, x, ids: v.gather(x, torch.stack([ids, (ids + 7) % 61], 1)).tanh().sum(1),
    "whole rows": lambda v, x, ids: (v.rows(x).softmax(-1).square() * torch.arange(61)).sum(-1),
    "entropy": entropy_of,
    "normalised": of_normalised,
    "log-prob": lambda v, x, ids: v.gather(x - v.expand(v.logsumexp(x)), ids),
}


def losses(formula: str) -> dict[str, Any]:
    """A loss per sequence, one with whole sequences, and one per pack, by a formula."""
    from roll_batching.losses import LossOutput

    compute = FORMULAS[formula]

    class Parts:
        needs, masks = {"logits"}, ("response_mask",)

        def sequence_loss(self, s: Any) -> Any:
            x = compute(s.vocabulary, s.logits, s.labels)
            return LossOutput(s.mean(x) + 0.3 * s.sequence_mean(x), {"x": s.mean_metric(x)})

    class Whole(Parts):
        gather_cp = True

    class Packs:
        needs, masks = {"logits"}, ("response_mask",)

        def token_loss(self, tokens: Any) -> Any:
            labels = tokens.input_ids.roll(-1, 0)
            x = compute(tokens.vocabulary, tokens.logits, labels)
            return LossOutput(tokens.mean(x) + 0.3 * tokens.sequence_mean(x), {"x": tokens.mean_metric(x)})

    return {"parts": Parts(), "whole": Whole(), "packs": Packs()}


def batch() -> Any:
    from tests.support.models import random_batch

    return random_batch(3, 9, 40)


def by_torch(formula: str) -> tuple[Any, Any]:
    """Loss and gradients, one unpacked sequence at a time through stock Megatron."""
    from tests.support.reference import gradients, stock_model

    model, data, totals = stock_model(), batch(), []
    for tokens, mask in zip(data.to_lists("input_ids"), data.to_lists("response_mask"), strict=True):
        length, counted = len(tokens), mask[1:].bool()
        hidden_from = torch.ones(1, 1, length, length).triu(1).bool()
        x = model(tokens[None], torch.arange(length)[None], hidden_from)[0, :-1]
        totals.append((FORMULAS[formula](PlainRows, x, tokens[1:])[counted], int(counted.sum())))
    count, present = sum(n for _, n in totals), [(x, n) for x, n in totals if n]
    loss = sum(x.sum() for x, _ in present) / count + 0.3 * sum(x.mean() for x, _ in present) / len(present)
    return float(loss), gradients(model, loss)


def expected(_: None) -> dict[str, Any]:
    make_strategy()  # opens the process groups
    return {formula: by_torch(formula) for formula in FORMULAS}


def of_every_formula(payload: Any) -> dict[str, tuple[float, float]]:
    megatron, right = payload
    strategy, found = make_strategy(megatron=megatron), {}
    for formula in FORMULAS:
        for name, loss in losses(formula).items():
            found[f"{formula}, {name}"] = gap(step(strategy, batch(), loss), right[formula])
    return found


LAYOUTS = {
    "one rank": (1, {}),
    "tensor 2, sequence parallel": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "tensor 2": (2, {"tensor_model_parallel_size": 2}),
    "context 2": (2, {"context_parallel_size": 2}),
    "tensor 2, context 2": (4, {"tensor_model_parallel_size": 2, "context_parallel_size": 2}),
    "tensor 4": (4, {"tensor_model_parallel_size": 4, "sequence_parallel": True}),
}


@pytest.fixture(scope="module")
def right() -> Any:
    return run_ranks(1, HERE + "expected")[0]


@pytest.mark.parametrize("layout", [pytest.param(x, marks=[pytest.mark.slow] * (LAYOUTS[x][0] > 2)) for x in LAYOUTS])
def test_operations_over_the_vocabulary_equal_those_on_whole_rows(layout: str, right: Any, report) -> None:
    ranks, megatron = LAYOUTS[layout]
    for rank in run_ranks(ranks, HERE + "of_every_formula", (megatron, right)):
        worst = max(rank, key=lambda name: max(rank[name]))
        assert max(rank[worst]) < 1e-5, (worst, rank[worst])
    report(f"operations over the vocabulary, {layout}: worst difference {max(rank[worst]):.1e} ({worst})")


def a_shard_of_padding(_: None) -> tuple[list[Any], torch.Tensor]:
    """Values and the whole gradient for 3 tokens in shards of 4 columns: the second rank has padding alone."""
    import torch.distributed as dist

    from roll_batching.losses.vocabulary import Vocabulary

    dist.init_process_group("gloo")
    whole = torch.arange(16.0).reshape(2, 8).sin()
    x = whole[:, 4 * dist.get_rank() :][:, :4].clone().requires_grad_()
    v = Vocabulary(size=3, shard=4, group=dist.group.WORLD)
    ids = torch.tensor([2, 3])
    values = [v.sum(x), v.max(x), v.logsumexp(x), v.gather(x, ids), v.rows(x)]
    (values[0] + 2 * values[1] + 3 * values[2] + values[4].square().sum(-1)).sum().backward()
    values[3][0].backward()
    return [value.detach() for value in values], x.grad


def test_a_shard_without_a_token_and_an_id_that_is_none() -> None:
    whole = torch.arange(16.0).reshape(2, 8).sin()
    x = whole[:, :3].clone().requires_grad_()
    loss = x.sum(-1) + 2 * x.amax(-1) + 3 * x.logsumexp(-1) + x.square().sum(-1)
    (loss.sum() + x[0, 2]).backward()
    (values, gradient), (others, of_padding) = run_ranks(2, HERE + "a_shard_of_padding")
    for found, right in zip(values, (x.sum(-1), x.amax(-1), x.logsumexp(-1), None, x), strict=True):
        assert right is None or torch.allclose(found, right)
    assert values[3][0] == x[0, 2] and values[3][1].isnan(), "the id 3 is a padded column"
    assert torch.allclose(gradient[:, :3], x.grad) and not gradient[:, 3].any() and not of_padding.any()
    assert all(torch.equal(a, b) or a.isnan().any() for a, b in zip(values, others, strict=True))


def with_banned_tokens(ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-sum-exp of rows whose first column is -inf on each of 2 ranks, and this rank's gradient."""
    import torch.distributed as dist

    from roll_batching.losses.vocabulary import Vocabulary

    dist.init_process_group("gloo")
    shard = 8 // ranks
    x = banned_rows()[:, shard * dist.get_rank() :][:, :shard].clone().requires_grad_()
    total = Vocabulary(size=8, shard=shard, group=dist.group.WORLD).logsumexp(x)
    (total * torch.tensor([1.0, 2.0])).sum().backward()
    return total.detach(), x.grad


def banned_rows() -> torch.Tensor:
    return torch.arange(16.0).reshape(2, 8).sin().index_fill(1, torch.tensor([0, 4]), -torch.inf)


@pytest.mark.parametrize("ranks", [1, 2])
def test_columns_of_minus_infinity_count_as_zero(ranks: int) -> None:
    x = banned_rows().requires_grad_()
    (x.logsumexp(-1) * torch.tensor([1.0, 2.0])).sum().backward()
    outcomes = run_ranks(ranks, HERE + "with_banned_tokens", ranks)
    assert all(torch.allclose(total, x.logsumexp(-1)) for total, _ in outcomes)
    assert torch.allclose(torch.cat([gradient for _, gradient in outcomes], 1), x.grad)


def in_bf16(_: None) -> tuple[float, float]:
    """Sum and log-sum-exp of 4,096 columns of 1, in bf16."""
    from roll_batching.losses.vocabulary import Vocabulary

    v = Vocabulary(size=4096, shard=4096, group=None)
    x = torch.ones(1, 4096, dtype=torch.bfloat16)
    return float(v.sum(x)), float(v.logsumexp(x))


def test_sums_accumulate_in_fp32() -> None:
    total, logsumexp = run_ranks(1, HERE + "in_bf16")[0]
    assert total == 4096 and logsumexp == pytest.approx(1 + torch.tensor(4096.0).log().item(), rel=1e-6)


def refusals(_: None) -> list[str]:
    from roll_batching.errors import LossError
    from roll_batching.losses import LossOutput

    class Undeclared:
        masks = ("response_mask",)

        def token_loss(self, tokens: Any) -> Any:
            return LossOutput(tokens.mean(tokens.vocabulary.sum(tokens.log_probs)))

    class NoColumns(Undeclared):
        needs = {"logits"}

        def token_loss(self, tokens: Any) -> Any:
            return LossOutput(tokens.mean(tokens.vocabulary.sum(tokens.full_logits()[:, :5])))

    strategy, messages = make_strategy(), []
    for loss in (Undeclared(), NoColumns()):
        try:
            step(strategy, batch(), loss)
        except LossError as error:
            messages.append(str(error))
    return messages


@pytest.mark.bad_input
def test_what_has_no_columns_is_refused() -> None:
    undeclared, shape = run_ranks(1, HERE + "refusals")[0]
    assert "reads vocabulary, which it does not declare: add 'logits'" in undeclared
    assert "over the vocabulary got a tensor of shape" in shape and "[positions, 61]" in shape
