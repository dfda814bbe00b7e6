"""The process that runs a host's functions: requests as JSON on standard input, figures as JSON on standard output."""

from __future__ import annotations

import contextlib
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.campaigns.conversion_proof.stand_ins import StandIns

Figures = dict[str, Any]
"""By name, a number, a text, None, or nested lists of numbers. `compare` has the names."""


def padded(responses: dict[str, Any]) -> dict[str, Any]:
    """Tensors [n, longest response] of `samples.responses`, and their `mask`."""
    import torch

    fields = {name: torch.tensor(values) for name, values in responses.items() if isinstance(values[0], list)}
    width = next(iter(fields.values())).shape[1]
    fields["mask"] = (torch.arange(width) < torch.tensor(responses["lengths"])[:, None]).long()
    return fields


def answer_all(prepare: Callable[[], StandIns], figures: Callable[[dict[str, Any]], Figures]) -> None:
    """Answers every request; an error of the host stands in the place of its figures."""
    checkout = Path(sys.argv[1]).resolve()
    sys.path.append(str(checkout))  # behind our own: hosts have a package `tests`, too
    answers: list[Figures] = []
    with contextlib.redirect_stdout(sys.stderr):
        stand_ins = prepare()
        for request in json.load(sys.stdin):
            try:
                answers.append(figures(request | {"checkout": str(checkout)}))
            except (Exception, SystemExit) as error:  # whatever the host raises belongs into the table
                traceback.print_exc()
                answers.append({"error": f"{type(error).__name__}: {error}"})
    print(json.dumps({"answers": answers, "stand_ins": stand_ins.used}, default=_plain))


def _plain(value: Any) -> Any:
    """A number of numpy or torch, or a list of OmegaConf, for JSON."""
    return value.item() if hasattr(value, "item") else list(value)
