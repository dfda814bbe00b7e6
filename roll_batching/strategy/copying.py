"""A strategy's weights: made whole for whoever reads them, and taken over from another strategy's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roll_batching.strategy.offload import MovableStates
from roll_batching.strategy.weights import Transfer, check_same_parameters, copy_parameters, gather_parameters

if TYPE_CHECKING:
    from roll_batching.strategy.resharding import Resharding


class TakesWeights(MovableStates):
    """A strategy whose weights others read, and which takes over theirs."""

    _way: Resharding | None = None
    """How weights come from the strategy that they last came from."""

    def gather_parameters(self) -> None:
        """Makes parameters whole on every rank: before you read those of `chunks` yourself. Collective."""
        self._host.require(["parameters"], "gather_parameters")
        gather_parameters(self.state.chunks)

    def copy_weights_from(self, other: TakesWeights) -> Transfer:
        """Takes over the parameters of a strategy with the same model, in whatever parallel layout. Collective.

        Between two layouts they travel in buckets (`strategy.resharding`); what that took is returned. Raises
        `RankError` (one rank: `LayoutError`) when the models differ.
        """
        self._host.require(["parameters"], "copy_weights_from")
        with self.state.layout.team.agree("copy_weights_from") as facts:
            theirs, mine = other.state, self.state
            other._host.require(["parameters"], "the strategy that copy_weights_from reads")
            facts.equal("the layout that weights come from", theirs.layout.dims)
            alike = theirs.layout.dims == mine.layout.dims
            if alike:
                check_same_parameters(theirs, mine)
        if alike:
            copy_parameters(theirs.chunks, mine.chunks)
            return Transfer()
        from roll_batching.strategy.resharding import Resharding

        gather_parameters(theirs.chunks)
        gather_parameters(mine.chunks)
        way = self._way
        if way is None or way.source.chunks is not theirs.chunks or way.target.chunks is not mine.chunks:
            way = self._way = Resharding(theirs, mine, mine.layout.host_group)
        return way.copy()
