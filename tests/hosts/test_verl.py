"""Losses of verl, unmodified, through its own entrance with our passes behind: equal to a plain model's."""

from __future__ import annotations

import pytest

from tests.hosts import host_verl
from tests.hosts.layouts import cases, check


@pytest.mark.parametrize(("layout", "variant", "steps"), cases(list(host_verl.VARIANTS)))
def test_a_loss_trains_as_on_a_plain_model(layout: str, variant: str, steps: int) -> None:
    check("verl", layout, variant, steps)
