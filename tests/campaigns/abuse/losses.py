"""Abuses of a job's loss: its gradient and its masks."""

from __future__ import annotations

from tests.campaigns.abuse.runner import FAILED, Abuse

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


LOSSES = [
    _lost("no weight reaches it", "without a gradient to the model", loss="torch.tensor(1.0, requires_grad=True)"),
    _lost("a mask of fractions", "'response_mask' of sample", "neither 0 nor 1", mask="mask * 0.5"),
]
