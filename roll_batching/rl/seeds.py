"""Seeds of what is drawn at random in a step."""

from __future__ import annotations

import numpy as np


def step_seed(seed: int, *step: int) -> int:
    """A seed of its own for each step, or part of one, 32 bits wide."""
    return int(np.random.SeedSequence([seed, *step]).generate_state(1)[0])
