"""Legal numbers of micro-batches per rank, with Megatron's rule for interleaving."""

from __future__ import annotations

import math

from roll_batching.errors import PlanError
from roll_batching.planning.constraints import PlanConstraints


def is_admissible(count: int, pp_size: int, group_size: int) -> bool:
    """Whether Megatron's interleaved schedule accepts `count` micro-batches in groups of `group_size`.

    It requires pp_size <= group_size <= count, and a last group that is full or holds at least pp_size
    (`megatron/core/pipeline_parallel/schedules.py`, the checks before the interleaved schedule).
    """
    if not pp_size <= group_size <= count:
        return False
    remainder = count % group_size
    return remainder == 0 or remainder >= pp_size


def smallest_group(count: int, pp_size: int) -> int:
    """Smallest group size that admits `count` micro-batches; raises `PlanError` if count < pp_size."""
    for group_size in range(pp_size, count + 1):
        if is_admissible(count, pp_size, group_size):
            return group_size
    raise PlanError(f"{count} micro-batches are below pp_size={pp_size}: Megatron cannot interleave them")


def legal_count(count: int, constraints: PlanConstraints) -> int:
    """Smallest legal number of micro-batches that is at least `count` and `min_num_micro_batches`."""
    multiple, pp_size, group_size = constraints.num_micro_batches_multiple, constraints.pp_size, constraints.group_size
    count = max(count, constraints.min_num_micro_batches, 1)
    if constraints.interleaved and group_size is None:
        multiple = math.lcm(multiple, pp_size)
    elif constraints.interleaved:
        count = max(count, group_size if isinstance(group_size, int) else pp_size)
    count = -(-count // multiple) * multiple
    if constraints.interleaved and isinstance(group_size, int):
        while not is_admissible(count, pp_size, group_size):
            count += multiple
    return count


def group_size_of(count: int, constraints: PlanConstraints) -> int | None:
    """Megatron's group size for `count` micro-batches; None without interleaving."""
    if not constraints.interleaved:
        return None
    if constraints.group_size is None:
        return constraints.pp_size
    if constraints.group_size == "auto":
        return smallest_group(count, constraints.pp_size)
    return int(constraints.group_size)


def check_count(count: int, constraints: PlanConstraints) -> None:
    """Raise `PlanError` if `count` is not a legal number of micro-batches per rank."""
    if legal_count(count, constraints) != count:
        rule = f"min_num_micro_batches={constraints.min_num_micro_batches}"
        if constraints.num_micro_batches_multiple > 1:
            rule += f", num_micro_batches_multiple={constraints.num_micro_batches_multiple}"
        if constraints.interleaved:
            rule += f", pp_size={constraints.pp_size}, group_size={constraints.group_size!r}"
        raise PlanError(
            f"{count} micro-batches per rank are not legal for {rule}; the next legal number is "
            f"{legal_count(count, constraints)}"
        )


def legal_counts(least: int, most: int, constraints: PlanConstraints, limit: int) -> list[int]:
    """About `limit` legal numbers from `least` to `most`, in equal ratios; at least one."""
    first = legal_count(least, constraints)
    last = max(most, first)
    counts = []
    for step in range(limit):
        wanted = round(first * (last / first) ** (step / (limit - 1)))
        counts.append(legal_count(wanted, constraints))
    return sorted({count for count in counts if count <= last} | {first})
