"""What context-parallel ranks send each other in gated delta nets and Mamba layers, by what they divide.

Ranks that divide the heads send the tokens of all heads, there and back. Ranks that divide the sequence send what each
of their pieces makes of a state (`modeling.recurrences.Exchange`): as much for a long sequence as for a short one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from roll_batching.checked_fields import CheckedFields, Count
from roll_batching.errors import PlanError

Floats = NDArray[np.float64]
Divided = Literal["auto", "heads", "sequence"]

TOKEN_BYTES, STATE_BYTES = 2, 4
"""Bytes of an element: tokens have the dtype of the model, 16 bits as a rule, and states fp32."""


@dataclass(frozen=True, kw_only=True)
class RecurrentExchange(CheckedFields, error=PlanError):
    """Sizes of a model's recurrent layers on one tensor-parallel rank."""

    layers: Count
    """Recurrent layers of the whole model."""
    units: Count
    """Parts of a layer's heads that lie together on a rank."""
    heads: Count = 1
    """Parts of a unit that several ranks can divide."""
    channels: Count
    """Elements of a token that ranks send which divide the heads, there and back."""
    map_elements: Count
    """Elements of what a piece makes of a state."""
    divide: Divided = "auto"
    """"auto": the heads, where they can be divided and ranks send less for them."""

    def can_divide_heads(self, cp_size: int) -> bool:
        """Whether this many ranks can divide the units, or the heads of each."""
        return self.units % cp_size == 0 or (cp_size % self.units == 0 and self.heads % (cp_size // self.units) == 0)

    def divides_heads(self, tokens: int, maps: int, cp_size: int) -> bool:
        """Whether ranks of a pack of `tokens` tokens divide heads, when each sends `maps` maps for the sequence."""
        if self.divide != "auto":
            return self.divide == "heads"
        return self.can_divide_heads(cp_size) and tokens * self._of_heads(cp_size) <= self._of_maps(maps, cp_size)

    def received(self, tokens: Floats, cp_size: int) -> Floats:
        """Bytes that a rank receives in the forward pass of a layer, for each of some sequences.

        "auto" is decided for each sequence here, and for a whole pack in `divides_heads`: so it is a lower bound.
        """
        # The last rank holds two neighbouring pieces as one; of two ranks each sends one.
        of_states = np.full(len(tokens), self._of_maps(min(cp_size - 1, 2), cp_size))
        of_heads = tokens * self._of_heads(cp_size)
        if self.divide == "heads":
            return of_heads
        fewer: Floats = np.minimum(of_heads, of_states)
        return fewer if self.divide == "auto" and self.can_divide_heads(cp_size) else of_states

    def _of_heads(self, cp_size: int) -> float:
        """Bytes that a rank receives for each token of the pack."""
        return (cp_size - 1) / cp_size**2 * self.channels * TOKEN_BYTES

    def _of_maps(self, maps: int, cp_size: int) -> float:
        return float((cp_size - 1) * maps * self.map_elements * STATE_BYTES)
