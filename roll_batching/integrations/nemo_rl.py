"""NeMo-RL with our planner: a packer under the name `roll_batching`.

Import this module in the run script, and name the packer in the YAML:

    policy: {sequence_packing: {enabled: true, algorithm: roll_batching}}

It replaces `get_packer`, which gives NeMo-RL's packers for all other names. NeMo-RL deals bins to ranks in turn
(`bins[shard::shards]`), so bins ordered by index and then by rank carry the whole plan: which samples share a
micro-batch, on which rank, in which order. Kept of NeMo-RL: the number of bins is a multiple of the shards, none is
empty, too few sequences are a ValueError.

Source: nemo_rl/data/packing/algorithms.py, nemo_rl/distributed/batched_data_dict.py at 7ea279a.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from roll_batching.errors import PlanError
from roll_batching.integrations.replacement import Integration, Replacement
from roll_batching.planning import PlanConstraints, plan_step

ALGORITHM = "roll_batching"
"""The packer's name in `policy.sequence_packing.algorithm`."""


def get_packer(
    algorithm: Any,
    bin_capacity: int,
    collect_metrics: bool = False,
    min_bin_count: int | None = None,
    bin_count_multiple: int | None = None,
) -> Any:
    """Our packer for the name `roll_batching`, otherwise NeMo-RL's."""
    limits = {"min_bin_count": min_bin_count, "bin_count_multiple": bin_count_multiple}
    if str(algorithm).lower() != ALGORITHM:
        return _NEMO_RL.original(_GET_PACKER)(algorithm, bin_capacity, collect_metrics, **limits)
    return _packer_class()(bin_capacity, collect_metrics=collect_metrics, **limits)


def plan_bins(lengths: Sequence[int], capacity: int, ranks: int, least: int = 1) -> list[list[int]]:
    """Bins of a plan for `ranks`, by micro-batch and then by rank: bin k * ranks + r is rank r's k-th.

    `least`: fewest bins. Raises ValueError where sequences are too long or too few, as NeMo-RL's packers do.
    """
    constraints = PlanConstraints(
        dp_size=ranks, max_tokens=capacity, min_num_micro_batches=max(1, -(-least // ranks)), fillers=False
    )
    try:
        plan = plan_step(lengths, constraints)
    except PlanError as error:
        raise ValueError(str(error)) from None
    return [
        plan.micro_batches[rank][k].samples.tolist() for k in range(plan.num_micro_batches) for rank in range(ranks)
    ]


def _packer_class() -> type:
    """A `SequencePacker` of NeMo-RL's that plans; its class exists only once NeMo-RL is imported."""
    from nemo_rl.data.packing.algorithms import SequencePacker

    class PlannedPacker(SequencePacker):  # type: ignore[misc]
        """Bins of one plan over all shards."""

        def _pack_implementation(self, sequence_lengths: list[int]) -> list[list[int]]:
            if not sequence_lengths:
                return []
            return plan_bins(
                sequence_lengths, self.bin_capacity, self.bin_count_multiple or 1, least=self.min_bin_count or 1
            )

    return PlannedPacker


_NEMO_RL = Integration("NeMo-RL", package="nemo_rl", distribution="nemo-rl", tried=("7ea279a",))
_GET_PACKER = Replacement(
    module="nemo_rl.data.packing.algorithms",
    name="get_packer",
    parameters=("algorithm", "bin_capacity", "collect_metrics", "min_bin_count", "bin_count_multiple"),
    by=get_packer,
)


def patch() -> None:
    """Adds our packer to NeMo-RL's; importing this module does it. Raises IntegrationError."""
    _NEMO_RL.patch(_GET_PACKER)


def unpatch() -> None:
    """Gives NeMo-RL its own `get_packer` back."""
    _NEMO_RL.unpatch(_GET_PACKER)


patch()
