"""What counts in a step: masks that say so exactly, steps in which nothing does, losses that no weight reaches."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from tests.support.ranks import run_ranks

pytestmark = pytest.mark.bad_input

HERE = "tests.strategy.test_what_counts:"


def _strategy(**options: Any) -> Any:
    from tests.strategy.test_from_parts import _start
    from tests.strategy.test_handed_over import _adopt
    from tests.support.own_model import build

    _start()
    adopted = {name: options.pop(name) for name in ("scheduler", "scheduler_unit") if name in options}
    parts = build("packed", rotate="core", **options)
    if options.get("bucketed"):
        parts[0][0].config.no_sync_func = parts[0][0].no_sync
    if "scheduler" in adopted:
        adopted["scheduler"] = adopted["scheduler"](parts[1])
    return _adopt(parts, **adopted)


def _mine(strategy: Any, whole: Any) -> Any:
    return whole.select(torch.arange(strategy.layout.dp_rank, len(whole), strategy.layout.dp_size))


def _caught(call: Any, *arguments: Any, **options: Any) -> str:
    from roll_batching.errors import RollBatchingError

    try:
        call(*arguments, **options)
    except RollBatchingError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


BAD = {
    "a fraction": 0.5,
    "NaN": float("nan"),
    "infinity": float("inf"),
    "below zero": -1.0,
    "a count": 2.0,
    "a large number": 1e9,
}


def masked(_: None) -> dict[str, Any]:
    """By case, what each use of a mask raises; and the losses of masks of all dtypes."""
    from roll_batching.losses import SFTLoss, mismatched
    from roll_batching.samples import distribute, gather_lengths
    from tests.strategy.test_from_parts import _batch

    strategy, whole, found = _strategy(), _batch(), {}
    plan = strategy.plan(gather_lengths(_mine(strategy, whole)))
    kind = {"response_mask": "token"}

    def given(mask: torch.Tensor, kind: Any = kind) -> Any:
        return distribute(_mine(strategy, whole.with_fields({"response_mask": mask}, kind)), plan)

    at = int(whole.offsets[5]) + 1  # the sample 1035
    for name, value in BAD.items():
        mask = whole["response_mask"].double()
        mask[at] = value
        local = given(mask)
        found[name] = [
            _caught(strategy.train_step, local, plan, SFTLoss()),
            _caught(strategy.count, local, SFTLoss()),
            _caught(strategy.evaluate, local, plan, SFTLoss()),
            _caught(strategy.forward, local, plan, masks=("response_mask",)),
        ]
    whole_numbers = whole["response_mask"].long()
    whole_numbers[at] = 3
    found["an integer"] = [_caught(strategy.train_step, given(whole_numbers), plan, SFTLoss())]
    columns = whole["response_mask"][:, None].expand(-1, 2)
    found["columns"] = [_caught(strategy.train_step, given(columns), plan, SFTLoss())]
    found["nothing asked for"] = [_caught(strategy.forward, given(whole["response_mask"]), plan, masks=())]
    with_rubbish = whole["response_mask"].double()
    found["mismatched"] = [_caught(mismatched, given(with_rubbish.masked_fill(with_rubbish == 1, 0.5)))]
    dtypes = (torch.bool, torch.uint8, torch.int64, torch.float64, torch.bfloat16)
    losses = [strategy.evaluate(given(whole["response_mask"].to(d)), plan, SFTLoss())["loss"] for d in dtypes]
    of_next = whole["response_mask"].double().roll(-1)
    of_next[whole.offsets[1:] - 1] = float("nan")  # speaks of nothing
    losses.append(strategy.evaluate(given(of_next, {"response_mask": "next_token"}), plan, SFTLoss())["loss"])
    found["losses"] = losses
    return found


def test_a_mask_is_bool_or_exactly_0_and_1() -> None:
    one, other = run_ranks(2, HERE + "masked")
    assert one == other
    losses = one.pop("losses")
    assert len(set(losses)) == 1 and losses[0] > 0
    assert all("one value per token" in text for text in one.pop("columns"))
    assert all("masks=()" in text for text in one.pop("nothing asked for"))
    assert all("neither 0 nor 1" in text for text in one.pop("mismatched"))
    for name, texts in one.items():
        for text in texts:
            assert "'response_mask' of sample 1035" in text and "neither 0 nor 1" in text, (name, text)


def empty_steps(payload: dict[str, Any]) -> dict[str, Any]:
    """A step in which no mask counts a token, between two that train."""
    from roll_batching.losses import SFTLoss
    from roll_batching.samples import distribute, gather_lengths
    from tests.strategy.test_from_parts import _batch
    from tests.strategy.test_optimizer_step import _same, _schedule, _weights

    strategy = _strategy(optimizer={"weight_decay": 0.5, **payload}, scheduler=_schedule, scheduler_unit="steps")
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("roll_batching").addHandler(handler)
    whole = _batch()
    nothing = whole.with_fields({"response_mask": torch.zeros(whole.num_tokens)}, {"response_mask": "token"})
    plan = strategy.plan(gather_lengths(_mine(strategy, whole)))

    def step(batch: Any) -> Any:
        return strategy.train_step(distribute(_mine(strategy, batch), plan), plan, SFTLoss())

    step(whole)
    rate, before = step(whole).lr, _weights(strategy)
    empty = [step(nothing) for _ in range(2)]
    unchanged, after = _same(before, _weights(strategy)), step(whole)
    return {
        "skipped": [result.skipped for result in empty],
        "norms": [result.grad_norm for result in empty],
        "losses": [result.loss for result in empty],
        "unchanged": unchanged,
        "counted": strategy.skipped_steps,
        "rates": (rate, [result.lr for result in empty], after.lr),
        "goes on": not after.skipped and not _same(before, _weights(strategy)),
        "said": [text for text in said if "counts no token" in text],
    }


@pytest.mark.parametrize("optimizer", [{}, {"use_distributed_optimizer": True}], ids=["plain", "distributed"])
def test_a_step_in_which_nothing_counts_is_skipped_and_counted_and_said(optimizer: dict[str, Any]) -> None:
    for rank, found in enumerate(run_ranks(2, HERE + "empty_steps", optimizer)):
        assert found["skipped"] == [True, True] and found["counted"] == 2
        assert found["norms"] == found["losses"] == [0.0, 0.0]
        assert found["unchanged"] and found["goes on"]
        rate, empty, after = found["rates"]
        assert rate < empty[0] == empty[1] == after, "a skipped step does not count in the schedule"
        assert len(found["said"]) == (1 if rank == 0 else 0)


class _Constant:
    needs, masks = {"log_probs"}, ("response_mask",)

    def __init__(self, make: Any) -> None:
        self.make = make

    def token_loss(self, tokens: Any) -> Any:
        from roll_batching.losses import LossOutput

        return LossOutput(self.make(tokens))


class _ConstantBySequence(_Constant):
    token_loss = None

    def sequence_loss(self, sequence: Any) -> Any:
        from roll_batching.losses import LossOutput

        return LossOutput(self.make(sequence))


def without_a_path(_: None) -> dict[str, str]:
    from roll_batching.samples import distribute, gather_lengths
    from tests.strategy.test_from_parts import _batch

    found = {}
    own = torch.nn.Parameter(torch.ones(()))
    losses: dict[str, Any] = {
        "constant": lambda view: torch.tensor(1.0, requires_grad=True),
        "of its own": lambda view: (own * 2).exp(),
        "of its own and detached": lambda view: own * view["response_mask"].sum(),
    }
    for bucketed in (False, True):  # with overlapped reduction a parameter without a gradient is waited for
        strategy = _strategy(bucketed=bucketed)
        local = _mine(strategy, _batch())
        plan = strategy.plan(gather_lengths(local))
        local = distribute(local, plan)
        for name, make in losses.items():
            for kind in (_Constant, _ConstantBySequence):
                found[f"{name} {kind.__name__} {bucketed}"] = _caught(strategy.train_step, local, plan, kind(make))
        fine = _Constant(lambda view: view.mean(torch.where(view.log_probs > -1, view.log_probs, 0.0)))
        assert _caught(strategy.train_step, local, plan, fine) == "nothing"
    return found


def test_a_loss_that_no_weight_reaches_is_an_error() -> None:
    one, other = run_ranks(2, HERE + "without_a_path", timeout=120)
    assert one == other and len(one) == 12
    for name, text in one.items():
        assert text.startswith("LossError") and "log_probs, entropy, logits or values" in text, (name, text)
