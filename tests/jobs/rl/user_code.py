"""Functions as users write them, whose errors are raised inside of libraries and of this package."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch

from roll_batching.losses import LossOutput


def in_json(*_: Any) -> float:
    return float(json.loads("{oops"))  # in_json


def in_numpy(*_: Any) -> float:
    return float(np.linalg.inv(np.zeros((2, 3)))[0, 0])  # in_numpy


def in_own_line(*_: Any) -> float:
    raise KeyError("level")  # in_own_line


def in_import(*_: Any) -> float:
    import roll_batching.nowhere  # in_import

    return roll_batching.nowhere


def in_syntax(*_: Any) -> float:
    exec("def (")  # in_syntax


class InTorch:
    """A loss that fails inside of torch."""

    needs, masks = frozenset({"log_probs"}), ("response_mask",)

    def token_loss(self, tokens: Any) -> LossOutput:
        return LossOutput(torch.einsum("ij,jk->ik", tokens.log_probs, tokens.log_probs).sum())  # InTorch


class InView:
    """A loss that uses its view wrongly: a mask that it has not declared."""

    needs, masks = frozenset({"log_probs"}), ("response_mask",)

    def token_loss(self, tokens: Any) -> LossOutput:
        return LossOutput(-tokens.mean(tokens.log_probs, mask="other_mask"))  # InView


async def rollout_in_json(*_: Any) -> Any:
    return in_json()
