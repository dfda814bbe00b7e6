"""Gradients behind a frozen embedding."""

from __future__ import annotations

from typing import Any

import torch


def require_embedding_gradients(gpt: Any) -> None:
    """Lets gradients reach the output of a frozen embedding; does nothing on stages without one.

    Recomputation drops the graph of inputs that need no gradient: the first layers would get none.
    """
    if gpt.pre_process:
        gpt.embedding.register_forward_hook(_require_gradient)


def _require_gradient(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() and not output.requires_grad else output
