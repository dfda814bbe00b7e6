"""Errors of losses in a loop of one's own name the user's line, the field's kind, and `prepare`."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from tests.losses.steps import make_strategy, step
from tests.support.ranks import run_ranks

pytestmark = [pytest.mark.loss, pytest.mark.bad_input]

HERE = "tests.losses.test_errors:"


def scaled(tokens: Any) -> Any:
    return tokens.log_probs * tokens["advantages"]


class Raw:
    """A sample field beside token values."""

    masks = ("response_mask",)

    def token_loss(self, tokens: Any) -> Any:
        from roll_batching.losses import LossOutput

        return LossOutput(tokens.mean(scaled(tokens)))


class RawInWhere(Raw):
    def token_loss(self, tokens: Any) -> Any:
        from roll_batching.losses import LossOutput

        return LossOutput(tokens.mean(torch.where(tokens["advantages"] > 0, tokens.log_probs, 0.0)))


class OtherSizes(Raw):
    """Sizes that have nothing to do with samples."""

    def token_loss(self, tokens: Any) -> Any:
        return tokens.log_probs[:3] * tokens.log_probs[:2]


class TokensAsSamples(Raw):
    def token_loss(self, tokens: Any) -> Any:
        return tokens.sample_mean(tokens.log_probs)


class ExpandedTokens(Raw):
    def token_loss(self, tokens: Any) -> Any:
        return tokens.mean(tokens.expand(tokens.log_probs))


class Prepares(Raw):
    """Reads a field that its `prepare` makes."""

    def prepare(self, batch: Any, layout: Any, seed: int) -> Any:
        ones = torch.ones(len(batch))
        return batch.with_fields({"made": ones}, {"made": "sample"})

    def token_loss(self, tokens: Any) -> Any:
        from roll_batching.losses import LossOutput

        return LossOutput(tokens.mean(-tokens.log_probs * tokens.per_token("made")))


class PreparesSums(Prepares):
    sums = ("made",)


class PreparesSequences(Prepares):
    token_loss = None

    def sequence_loss(self, sequence: Any) -> Any:
        from roll_batching.losses import LossOutput

        return LossOutput(sequence.mean(-sequence.log_probs() * sequence["made"]))


def losses() -> dict[str, Any]:
    from roll_batching.losses import ClipCovLoss, KlCovLoss

    own = (Raw, RawInWhere, OtherSizes, TokensAsSamples, ExpandedTokens, Prepares, PreparesSums, PreparesSequences)
    return {**{loss.__name__: loss() for loss in own}, "ClipCovLoss": ClipCovLoss(), "KlCovLoss": KlCovLoss()}


def messages(_: None) -> dict[str, str]:
    from roll_batching.errors import RollBatchingError
    from tests.support.models import random_batch

    strategy, found = make_strategy(), {}
    for name, loss in losses().items():
        try:
            step(strategy, random_batch(3, 9, 30), loss)
            found[name] = ""
        except RollBatchingError as error:
            found[name] = str(error)
    batch = random_batch(3, 9, 30)
    try:
        strategy.count(batch, PreparesSums())
    except RollBatchingError as error:
        found["count"] = str(error)
    prepared = PreparesSums().prepare(batch, strategy.layout, 0)
    found["prepared"] = str(step(strategy, prepared, PreparesSums())[0].skipped)
    return found


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    return run_ranks(1, HERE + "messages")[0]


def line_of(function: Any, text: str) -> str:
    source, first = inspect.getsourcelines(function)
    return f"test_errors.py:{first + next(i for i, line in enumerate(source) if text in line)}"


@pytest.mark.parametrize(("name", "function", "text"), [
    ("Raw", scaled, "return"), ("RawInWhere", RawInWhere.token_loss, "return"),
])  # fmt: skip
def test_a_sample_field_among_tokens_names_the_line_and_per_token(said: Any, name: str, function: Any, text: str):
    assert f"{line_of(function, text)})" in said[name]
    assert 'tokens.per_token("advantages") has one value per token' in said[name]


def test_other_sizes_name_the_line_alone(said: Any) -> None:
    assert f"{line_of(OtherSizes.token_loss, 'return')})" in said["OtherSizes"]
    assert "per_token" not in said["OtherSizes"]


@pytest.mark.parametrize(("loss", "method"), [(TokensAsSamples, "sample_mean"), (ExpandedTokens, "expand")])
def test_tokens_in_place_of_samples_name_the_line_and_reductions(said: Any, loss: Any, method: str) -> None:
    message = said[loss.__name__]
    assert f"{method} takes one value per sample (" in message and "segment_mean" in message
    assert f"{line_of(loss.token_loss, 'return')})" in message and "per_token" not in message


@pytest.mark.parametrize("name", ["ClipCovLoss", "KlCovLoss", "Prepares", "PreparesSums", "PreparesSequences", "count"])
def test_a_missing_field_names_prepare(said: Any, name: str) -> None:
    assert "has a `prepare`" in said[name] and "loss.prepare(local, strategy.layout, seed)" in said[name]
    assert ("held_back" if name.endswith("CovLoss") else "made") in said[name]


def test_a_prepared_batch_trains(said: Any) -> None:
    assert said["prepared"] == "False"
