"""Abuses of a job's loss: its gradient, its masks, its fields; and of the check of losses."""

from __future__ import annotations

from tests.campaigns.abuse.runner import DONE, FAILED, REFUSED, Abuse

_LOSS = """import torch
from roll_batching.losses import LossOutput
class Loss:
    masks = ("response_mask",)
    def token_loss(self, tokens):
        return LossOutput({loss})
    def prepare(self, home, layout, seed):
        mask = home["response_mask"]
        return home.with_fields({{"response_mask": {mask}}}, {{"response_mask": home.schema["response_mask"]}})
"""
_MEAN = "-tokens.mean(tokens.log_probs * tokens.per_token('advantages'))"


def _lost(name: str, *words: str, loss: str = _MEAN, mask: str = "mask") -> Abuse:
    return Abuse(
        name=f"loss: {name}",
        code=FAILED,
        settings={"loss_function": "losing:Loss"},
        files={"losing.py": _LOSS.format(loss=loss, mask=mask)},
        words=words,
    )


_CHECKED = """import os, sys, time, torch
from roll_batching.losses import LossOutput
class Loss:
    masks = ("response_mask",)
    def token_loss(self, tokens):
        {line}
        return LossOutput({loss})
"""


def _checked(
    name: str, *words: str, code: int = FAILED, loss: str = _MEAN, line: str = "", more: tuple[str, ...] = ()
) -> Abuse:
    return Abuse(
        name=f"check-loss: {name}",
        code=code,
        files={"losing.py": _CHECKED.format(loss=loss, line=line)},
        arguments=("-m", "roll_batching.cli", "check-loss", "losing:Loss", *more),
        words=words,
        seconds=150,
    )


LOSSES = [
    _checked("a right one", "The loss is the same in every run", code=DONE),
    _checked("a mean per micro-batch", "changes with 1 micro-batch", loss="-tokens.log_probs.mean()"),
    _checked("leaves the process", "ended early", line="sys.exit(3)"),
    _checked("kills the process", "ended early", line="os.kill(os.getpid(), 9)"),
    _checked("never returns", "did not end within 60 s", line="time.sleep(10**6)"),
    _checked("not a number", "the loss is nan", loss=f"{_MEAN} * float('nan')"),
    _checked("prints much", "The loss is the same in every run", code=DONE, line="print('x' * 10**6)"),
    _checked("a field without values", "reads the field 'margin'", "--field", loss="tokens.mean(tokens['margin'])"),
    _checked("a kind that is none", "give token, next_token or sample", more=("--field", "margin=tensor")),
    _checked("a setting that it lacks", "unknown setting", code=REFUSED, more=("beta=1",)),
    _lost(
        "a sample field among tokens",
        "losing.py:6",
        "per_token",
        loss="tokens.mean(tokens['advantages'] * tokens.log_probs)",
    ),
    Abuse(
        name="loss: routers to freeze in a dense model",
        code=REFUSED,
        settings={"actor_train.strategy_args.strategy_config.freeze_moe_router": True},
        words=("freeze_moe_router", "no mixture of experts"),
        lines=2,
    ),
    _lost("no weight reaches it", "without a gradient to the model", loss="torch.tensor(1.0, requires_grad=True)"),
    _lost("a mask of fractions", "'response_mask' of sample", "neither 0 nor 1", mask="mask * 0.5"),
]
