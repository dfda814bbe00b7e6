"""`from_parts`, `forward` and `train_step` abused: one clear error on every rank, before anything hangs.

Some get the rubbish on all ranks, some on the last one alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.strategy.bad_calls import SECONDS, Loss, errors_of
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.bad_input

HERE = "tests.strategy.test_bad_parts:"


class Scene:
    """Two models with their optimizers, one of which is adopted, and samples for it."""

    def __init__(self) -> None:
        from roll_batching.losses import SFTLoss
        from roll_batching.samples import distribute, gather_lengths
        from tests.strategy.test_from_parts import _batch, _start

        _start()
        self.parts, self.other = self.build(), self.build()
        self.strategy = self.adopt()
        whole = _batch()
        self.home = whole.select(torch.arange(self.strategy.layout.dp_rank, len(whole), self.strategy.layout.dp_size))
        self.plan = self.strategy.plan(gather_lengths(self.home))
        self.local, self.loss = distribute(self.home, self.plan), SFTLoss()
        rank = torch.distributed.get_rank()
        self.culprit = rank == torch.distributed.get_world_size() - 1

    def build(self, **options: Any) -> Any:
        from tests.support.own_model import build

        return build("packed", rotate="core", **options)

    def adopt(self, **given: Any) -> Any:
        from roll_batching.strategy import MegatronTrainStrategy
        from tests.strategy.test_from_parts import _batching

        good = {"model_chunks": self.parts[0], "optimizer": self.parts[1], "batching": _batching("packed")}
        return MegatronTrainStrategy.from_parts(**{**good, "vocab_size": 61, **given})

    def given(self, good: Any, rubbish: Any) -> Any:
        return rubbish if self.culprit else good

    def train(self, **given: Any) -> Any:
        return self.strategy.train_step(**{"local": self.local, "plan": self.plan, "loss": self.loss, **given})

    def scheduler(self, optimizer: Any) -> Any:
        from tests.strategy.test_optimizer_step import _schedule

        return _schedule(optimizer)


def _of_torch(kind: str) -> Callable[[Scene], Any]:
    def attempt(s: Scene) -> Any:
        return s.adopt(optimizer=getattr(torch.optim, kind)(s.parts[0][0].parameters(), lr=1e-3))

    return attempt


def _thawed(s: Scene) -> Any:
    chunks, optimizer = s.build(frozen=True)
    chunks[0].requires_grad_(True)
    return s.adopt(model_chunks=chunks, optimizer=optimizer)


def _of_two_chunks(s: Scene) -> Any:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    both = [s.parts[0][0], s.other[0][0]]
    return s.adopt(optimizer=get_megatron_optimizer(OptimizerConfig(lr=1e-3), both))


def _two_widths(s: Scene) -> Any:
    chunks, optimizer = s.build(**s.given({}, {"ffn_hidden_size": 96}))
    return s.adopt(model_chunks=chunks, optimizer=optimizer)


def _settings(**options: Any) -> Any:
    from roll_batching.strategy.model_state import StepSettings

    return StepSettings(**options)


def _counts(s: Scene, **tokens: float) -> Any:
    from roll_batching.losses.denominators import StepCounts

    return StepCounts(tokens=tokens, sequences={"response_mask": 3}, sums={})  # type: ignore[arg-type]


def _generation(**options: Any) -> Any:
    from roll_batching.strategy import GenerationSettings

    return GenerationSettings(**{"max_new_tokens": 2, "eos_token_id": 0, **options})


def _generate(name: str, value: Any) -> Callable[[Scene], Any]:
    return lambda s: s.strategy.generate(s.home, _generation(**{name: value}))


ENTRIES: dict[str, tuple[Callable[[Scene], Any], str]] = {
    # from_parts
    "an optimizer of another model": (lambda s: s.adopt(optimizer=s.other[1]), "parameters of another model"),
    "a distributed optimizer of another model": (
        lambda s: s.adopt(optimizer=s.build(optimizer={"use_distributed_optimizer": True})[1]),
        "parameters of another model",
    ),
    "an optimizer of more chunks": (_of_two_chunks, "parameters of another model"),
    "an optimizer of fewer parameters": (_thawed, "trainable parameters that the optimizer does not hold"),
    "another model's optimizer on one rank": (
        lambda s: s.adopt(optimizer=s.given(s.parts[1], s.other[1])),
        "parameters of another model",
    ),
    "torch.optim.SGD": (_of_torch("SGD"), "SGD is not a Megatron optimizer"),
    "torch.optim.AdamW": (_of_torch("AdamW"), "get_megatron_optimizer"),
    "an optimizer that is the class": (lambda s: s.adopt(optimizer=torch.optim.Adam), "get_megatron_optimizer"),
    "a forgotten list": (lambda s: s.adopt(model_chunks=s.parts[0][0]), "model_chunks must be a list"),
    "a dict of chunks": (lambda s: s.adopt(model_chunks={"model": s.parts[0][0]}), "model_chunks must be a list"),
    "the same chunk twice": (lambda s: s.adopt(model_chunks=s.parts[0] * 2), "the same chunk twice"),
    "temperature -1": (lambda s: s.adopt(temperature=-1.0), "temperature=-1.0"),
    "temperature inf": (lambda s: s.adopt(temperature=float("inf")), "temperature=inf"),
    "temperature NaN": (lambda s: s.adopt(temperature=float("nan")), "temperature=nan"),
    "temperature 0": (lambda s: s.adopt(temperature=0), "temperature=0"),
    "temperature of text": (lambda s: s.adopt(temperature="1.0"), "temperature='1.0'"),
    "temperature of truth": (lambda s: s.adopt(temperature=True), "temperature=True"),
    "another temperature": (lambda s: s.adopt(temperature=s.given(1.0, 0.7)), "ranks differ in the temperature"),
    "another vocabulary": (lambda s: s.adopt(vocab_size=s.given(61, 60)), "ranks differ in vocab_size"),
    "a vocabulary beyond the head": (lambda s: s.adopt(vocab_size=10**6), "vocab_size=1000000"),
    "a vocabulary of nothing": (lambda s: s.adopt(vocab_size=0), "vocab_size=0"),
    "a vocabulary of text": (lambda s: s.adopt(vocab_size="61"), "vocab_size='61'"),
    "a cost that is a function": (lambda s: s.adopt(cost=lambda n: n), "cost is a function"),
    "a scheduler of torch": (
        lambda s: s.adopt(
            scheduler=torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(s.parts[0][0].parameters(), 1))
        ),
        "OptimizerParamScheduler",
    ),
    "a scheduler of another optimizer": (
        lambda s: s.adopt(scheduler=s.scheduler(s.other[1]), scheduler_unit="steps"),
        "scheduler of another optimizer",
    ),
    "a scheduler without an optimizer": (
        lambda s: s.adopt(optimizer=None, scheduler=s.scheduler(s.parts[1]), scheduler_unit="steps"),
        "optimizer is None",
    ),
    "a size of groups that does not exist": (lambda s: s.adopt(settings=_settings(group_size="plan")), "'plan'"),
    "a group of no micro-batches": (lambda s: s.adopt(settings=_settings(group_size=0)), "group_size is 0"),
    "another width on one rank": (_two_widths, "ranks differ in the model"),
    "rows_form of text": (lambda s: s.adopt(rows_form="no"), "rows_form is 'no'"),
    # train_step, forward, generate
    "the class of a loss": (lambda s: s.train(loss=type(s.loss)), "the class SFTLoss"),
    "the class of a loss on one rank": (lambda s: s.train(loss=s.given(s.loss, type(s.loss))), "the class SFTLoss"),
    "needs that are a number": (lambda s: s.train(loss=Loss(needs=3)), "needs is 3"),
    "masks that are a number": (lambda s: s.train(loss=Loss(masks=3)), "masks is 3"),
    "sums that are None": (lambda s: s.train(loss=Loss(sums=None)), "sums is None"),
    "counts below zero": (lambda s: s.train(counts=_counts(s, response_mask=-3)), "response_mask"),
    "counts that are NaN": (lambda s: s.train(counts=_counts(s, response_mask=float("nan"))), "response_mask"),
    "a plan as a dict": (lambda s: s.train(plan=s.plan.to_dict()), "plan is a dict"),
    "samples as a list": (lambda s: s.train(local=[s.local]), "got list"),
    "masks as text": (lambda s: s.strategy.forward(s.local, s.plan, masks="response_mask"), "masks='response_mask'"),
    "needs as text": (lambda s: s.strategy.forward(s.local, s.plan, needs="log_probs"), "log_probs, entropy or both"),
    "generate, no temperature": (_generate("temperature", float("nan")), "temperature is nan"),
    "generate, tokens as text": (_generate("max_new_tokens", "2"), "max_new_tokens is '2'"),
    "generate, top_p 0": (_generate("top_p", 0.0), "top_p is 0.0"),
    "generate, top_k -1": (_generate("top_k", -1), "top_k is -1"),
    "generate, no seed": (_generate("seed", None), "seed is None"),
    "generate, a stop token as text": (_generate("stop_token_ids", ("</s>",)), "stop_token_ids"),
}


def attempts(_: None) -> list[tuple[str, str, float]]:
    """By entry: error class, message, seconds. After each, a good step still works."""
    scene = Scene()
    seen = list(errors_of((entry for entry, _ in ENTRIES.values()), scene))
    good = scene.train()
    assert good.loss == good.loss and not good.skipped
    return seen


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_abuse_is_one_error_on_all_ranks(ranks: int, report: Any) -> None:
    results = run_ranks(ranks, HERE + "attempts", timeout=240)
    wrong = {}
    for (name, (_, words)), seen in zip(ENTRIES.items(), zip(*results, strict=True), strict=True):
        if ranks == 1 and "ranks differ" in words:
            continue
        kinds, messages, seconds = zip(*seen, strict=True)
        fine = not any(kind == "nothing" or kind.startswith("bare") for kind in kinds)
        fine &= len(set(messages)) == 1 and words in messages[0] and max(seconds) < SECONDS
        if not fine:
            wrong[name] = seen
        elif ranks == 2:
            report(f"{name}: {messages[0].splitlines()[0][:150]}")
    assert not wrong


def numpy_arguments(_: None) -> float:
    """A step with integers and numbers of numpy, wherever a caller may have some."""
    import numpy as np

    scene = Scene()
    strategy = scene.adopt(vocab_size=np.int64(61), temperature=np.float32(0.5))
    settings = _generation(max_new_tokens=np.int64(2), eos_token_id=np.int32(0), seed=np.int64(3), top_k=np.int64(5))
    assert len(strategy.generate(scene.home, settings)) == len(scene.home)
    return float(strategy.train_step(scene.local, scene.plan, scene.loss).loss)


def test_numpy_numbers_are_numbers() -> None:
    run_ranks(1, HERE + "numpy_arguments")
