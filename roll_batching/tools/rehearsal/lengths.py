"""Sample lengths of a rehearsal: the fullest micro-batches that the caps allow, or the job's own data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from roll_batching.errors import ConfigError
from roll_batching.jobs.config import JobConfig
from roll_batching.jobs.inputs import load_inputs
from roll_batching.jobs.texts.epochs import EpochStream
from roll_batching.jobs.texts.fit import token_counts
from roll_batching.planning import CostModel, Plan, PlanConstraints, SharedPrefixes, plan_step
from roll_batching.planning.pack_times import PackTimes


@dataclass(frozen=True)
class Bin:
    """Samples of one micro-batch."""

    lengths: list[int]
    """Tokens of each sample."""
    prefix: int = 0
    """Tokens that the samples of a group have in common; 0: nothing is shared."""
    group_size: int = 1
    """Samples of each group but the last, which may have fewer."""

    def prefixes(self, copies: int) -> SharedPrefixes | None:
        """Prefixes of `copies` such bins, one after the other; None where nothing is shared."""
        if not self.prefix:
            return None
        groups = np.arange(len(self.lengths)) // self.group_size
        every = (groups + np.arange(copies)[:, None] * (groups[-1] + 1)).reshape(-1)
        lengths = np.tile(self.lengths, copies)
        return SharedPrefixes.of_groups(every, np.minimum(self.prefix, lengths), lengths)


def longest_groups(constraints: PlanConstraints, longest: int, prefix: int, group_size: int) -> Bin:
    """Fills a pack with samples of `longest` tokens, whose groups share `prefix` tokens, and a shorter last sample.

    The pack may end inside a group. If fewer than two samples fit, returns a pack of samples that share nothing.
    """
    align, room = constraints.sequence_alignment, constraints.usable_tokens
    # Only prefix - 1 positions are shared: the last token of the prefix predicts another token in each sample.
    first_slot, next_slot = _rounded(longest, align), _rounded(longest - (prefix - 1), align)
    lengths: list[int] = []
    while True:
        slot = next_slot if len(lengths) % group_size else first_slot  # the first sample of a group computes the prefix
        if slot > room:
            break
        lengths.append(longest)
        room -= slot
    if room // align:  # a shorter sample fills the pack
        shared = prefix - 1 if len(lengths) % group_size else 0
        lengths.append(shared + room // align * align)
    return Bin(lengths, prefix, group_size) if len(lengths) > 1 else Bin(longest_bin(constraints, longest))


def longest_bin(constraints: PlanConstraints, longest: int, unit: int = 1) -> list[int]:
    """Sample lengths of the fullest micro-batch, at most `longest` tokens each.

    `unit`: number of samples that stay together (2 for pairs).
    """
    if constraints.mode == "padded":
        width = constraints.padded_length or _rounded(longest, constraints.rectangle_alignment)
        return [longest] * (constraints.rows or max(1, constraints.usable_tokens // width))
    if constraints.mode == "packed":
        align = constraints.sequence_alignment
        whole, rest = divmod(constraints.usable_tokens, unit * _rounded(longest, align))
        short = min(rest // unit // align * align, longest)
        return [longest] * (unit * whole) + [short] * (unit if short else 0)
    # Rows of the longest samples, or more rows of shorter samples if that fills the cap better.
    align = constraints.rectangle_alignment
    width = _rounded(longest, align)
    rows = max(1, constraints.usable_tokens // width // unit) * unit
    shorter = constraints.usable_tokens // (rows + unit) // align * align
    if shorter and (rows + unit) * shorter > rows * width:
        return [min(shorter, longest)] * (rows + unit)
    return [longest] * rows


def _rounded(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def with_one_size(constraints: PlanConstraints, cp_size: int) -> PlanConstraints:
    """Constraints for packs that all have `cp_size`; returns `constraints` if the layout has one size anyway."""
    if not constraints.has_cp_per_pack:
        return constraints
    return replace(
        constraints,
        dp_size=constraints.dp_size // cp_size,
        cp_size=cp_size,
        max_tokens=(constraints.max_tokens or 0) * cp_size,
        max_cp_size=1,
    )


def plan_of_step(
    lengths: Sequence[int], constraints: PlanConstraints, cost: CostModel, times: PackTimes | None, unit: int = 1
) -> Plan:
    """Plan of an optimizer step over samples of known lengths, of which `unit` consecutive ones stay together."""
    group_ids = np.arange(len(lengths)) // unit if unit > 1 else None
    return plan_step(list(lengths), constraints, cost=cost, group_ids=group_ids, times=times)


def pack_sizes(plan: Plan) -> list[int]:
    """Context-parallel sizes of the packs of `plan`, ascending. Fillers count only if there is nothing else."""
    sizes = plan.cp_sizes if plan.fillers.all() else plan.cp_sizes[~plan.fillers]
    return [int(size) for size in np.unique(sizes)]


def fullest_bin(plan: Plan, cp_size: int) -> list[int]:
    """Sample lengths of the micro-batch of `cp_size` with the most tokens in `plan`."""
    micro_batches = [mb for rank in plan.micro_batches for mb in rank if mb.cp_size == cp_size]
    return [int(length) for length in max(micro_batches, key=lambda mb: mb.tokens).lengths]


def plan_of_equal_bins(constraints: PlanConstraints, content: Bin, micro_batches: int, cp_size: int = 1) -> Plan:
    """Plan with `micro_batches` per rank, each with the samples of `content`.

    Where each pack has its own context-parallel size, `cp_size` consecutive ranks share the same micro-batches.
    """
    block = cp_size if constraints.has_cp_per_pack else 1
    count = constraints.dp_size // block * micro_batches
    size = len(content.lengths)
    bins = [
        [
            list(range((rank // block * micro_batches + k) * size, (rank // block * micro_batches + k + 1) * size))
            for k in range(micro_batches)
        ]
        for rank in range(constraints.dp_size)
    ]
    return Plan.from_bins(bins, np.tile(content.lengths, count), constraints, prefixes=content.prefixes(count))


def lengths_of_data(config: JobConfig, dp_size: int) -> list[int]:
    """Token counts of the samples of the first optimizer step of `config`; for pairs chosen, rejected, chosen, ...

    Raises ConfigError if lengths are known only while the job runs, and the errors of `load_inputs`.
    """
    if not config.is_supervised or config.stream is not None:
        reason = (
            "a stream forms its steps" if config.is_supervised else "responses have no length before they are sampled"
        )
        raise ConfigError(
            f"--lengths data: {reason}. Give a file of lengths, or omit --lengths to rehearse the longest samples"
        )
    config.check_runnable()
    inputs = load_inputs(config)
    assert inputs.corpus is not None
    texts = config.mini_batch_size(dp_size) // (2 if config.task == "dpo" else 1)
    step = next(EpochStream(inputs.corpus, texts, seed=config.seed))
    return [int(count) for count in token_counts(step, inputs.tokenizer).reshape(-1)]
