"""`distribute` sends samples to the ranks that a plan gives them to; `collect` brings results back. By all-to-all.

Both check their input in a consensus first, then send each field in one all-to-all of bytes, so that every backend can
send every dtype. No shapes are exchanged: the plan has all lengths.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from roll_batching.distributed import Facts
from roll_batching.errors import DataError, first_of
from roll_batching.samples.batch import SampleBatch
from roll_batching.samples.exchange_group import ExchangeGroup
from roll_batching.samples.fields import FieldSpec
from roll_batching.samples.flatten import as_index, place, row_indices, starts_of
from roll_batching.samples.length_table import require_batch

if TYPE_CHECKING:
    from roll_batching.planning import Plan


def distribute(batch: SampleBatch, plan: Plan, group: Any = None) -> SampleBatch:
    """Sends samples to the data-parallel ranks that `plan` gives them to. Collective.

    Args:
        batch: the samples that this rank holds now; may be empty, and may hold samples that are not in the plan, as
            when a mini-batch is taken out of a rollout batch.
        plan: the same on all ranks. `plan.location` (from a `LengthTable`) has the rank that holds each sample; if it
            is None, one more small exchange finds out.
        group: by default Megatron's data-parallel group, else all processes, else this one alone.

    Returns:
        This rank's samples in plan order (`plan.rank_samples`), on the device that they came from. They are not
        truncated yet: packing does that. Samples in `plan.dropped` are not sent. With a context-parallel size per pack
        each rank that computes a part of a pack gets all of its samples.

    Raises:
        RankError: on all ranks, before anything is sent (`DataError` in a single process): ids that no rank or two
            ranks hold, a batch or lengths that contradict the plan, plans, schemas, dtypes or static values that
            differ between ranks.
    """
    dp_group = ExchangeGroup.of(group)
    with dp_group.consensus("distribute") as facts:
        require_batch("distribute", batch)
        require_plan(plan)
        state_facts(facts, batch, plan)
        routes = _routes(plan, dp_group, batch)
    routes = _locate(routes, plan, dp_group, batch, "distribute")
    outgoing = routes.outgoing
    samples = select_samples(batch, plan, outgoing)
    order = np.argsort(routes.location[routes.assigned], kind="stable")
    incoming = routes.assigned[order]
    to_rank = routes.computing[routes.location[routes.placed] == dp_group.rank]
    fields = exchange_fields(samples, plan, dp_group, to_rank, incoming, routes.location[incoming])
    received = SampleBatch(plan.ids[incoming], plan.lengths[incoming], fields, batch.schema)
    return received.select(np.argsort(order, kind="stable"))  # from the order of senders back to plan order


def collect(results: SampleBatch, plan: Plan, group: Any = None, *, like: SampleBatch | None = None) -> SampleBatch:
    """Sends results back to the ranks of their samples, in the order of the distributed batch. Collective.

    Args:
        results: of this rank's samples, in any order, with fields of any kind. Of samples that several ranks compute
            together, those of the first rank are taken.
        plan: the plan of `distribute`, the same on all ranks.
        group: as for `distribute`.
        like: the batch that was passed to `distribute`. Needed if the plan has no location. The result has its order;
            without it, that of the plan's samples, which is the same for a plan from `gather_lengths`. Only its ids
            and lengths are read.

    Returns:
        One row for each of the plan's samples that this rank holds, with its original length. Fields have their pad
        value where nothing was computed: in all rows of dropped samples (`plan.dropped`), and in the truncated rows
        of others.

    Raises:
        RankError: on all ranks, before anything is sent (`DataError` in a single process): missing results of a
            sample of this rank, results of another rank's sample or longer than the sample, and all of `distribute`.
    """
    dp_group = ExchangeGroup.of(group)
    with dp_group.consensus("collect") as facts:
        require_batch("collect", results)
        require_plan(plan)
        if like is not None:
            require_batch("collect", like, "like")
        elif plan.location is None and dp_group.size > 1:
            raise DataError("The plan does not say where samples lie: pass like=, the batch that was distributed.")
        state_facts(facts, results, plan)
        facts.equal("whether like= is given", like is not None)
        routes = _routes(plan, dp_group, like)
        computed = results_in_plan_order(results, plan, routes)
    if like is not None:
        routes = _locate(routes, plan, dp_group, like, "collect")
    held = np.flatnonzero(routes.location == dp_group.rank)
    if like is not None:
        rows = like.rows_of(plan.ids[held])
        held = held[np.argsort(rows.numpy(), kind="stable")]
    returned = routes.counted[routes.rank_of[routes.counted] == dp_group.rank]
    order = np.argsort(routes.location[returned], kind="stable")
    to_rank = routes.location[returned[order]]
    incoming = routes.counted[routes.location[routes.counted] == dp_group.rank]  # in the order in which they are sent
    fields = exchange_fields(computed.select(order), plan, dp_group, to_rank, incoming, routes.rank_of[incoming])
    return assemble(fields, results, plan, held, incoming)


# ---- routes


@dataclass(frozen=True)
class Routes:
    """Holder and computing rank of each sample of a plan. All arrays are int64; samples are indices into the plan."""

    location: np.ndarray
    """`[n]`: the rank that holds the sample; -1 if not known yet."""

    rank_of: np.ndarray
    """`[n]`: the rank that counts the sample, the first that computes it; -1 for dropped samples."""

    placed: np.ndarray
    """All samples that are not dropped, by (computing rank, plan order); a sample that several ranks compute together
    occurs once for each."""

    computing: np.ndarray
    """`[placed]`: the computing rank of each entry of `placed`."""

    rank: int
    """This rank."""

    @property
    def assigned(self) -> np.ndarray:
        """The samples that this rank computes, in plan order."""
        return self.placed[self.computing == self.rank]

    @property
    def counted(self) -> np.ndarray:
        """All samples that are not dropped, once each, by (counting rank, plan order)."""
        return self.placed[self.rank_of[self.placed] == self.computing]

    @property
    def outgoing(self) -> np.ndarray:
        """The samples that this rank holds and any rank computes, by (computing rank, plan order)."""
        return self.placed[self.location[self.placed] == self.rank]


def _routes(plan: Plan, dp_group: ExchangeGroup, held: SampleBatch | None) -> Routes:
    rank_of, placed, computing = placement_of(plan, dp_group.size)
    if plan.location is not None:
        location = np.asarray(plan.location, dtype=np.int64)
        if held is not None:
            check_location(plan, location, dp_group.rank, held)
    else:
        location = np.full(len(plan.ids), 0 if held is None else -1, dtype=np.int64)
    if held is not None:
        check_lengths(plan, held)
    return Routes(location, rank_of, placed, computing, dp_group.rank)


def placement_of(plan: Plan, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`rank_of`, `placed` and `computing` of `Routes`. Raises `DataError` unless the plan is for `size` ranks."""
    if len(plan.micro_batches) != size:
        ranks = len(plan.micro_batches)
        raise DataError(f"The plan is for {ranks} data-parallel ranks, the group has {size}. Plan for {size}.")
    per_rank = [np.asarray(plan.rank_samples(rank), dtype=np.int64) for rank in range(size)]
    placed = np.concatenate(per_rank)
    computing = np.repeat(np.arange(size), [samples.size for samples in per_rank])
    rank_of = np.full(len(plan.ids), -1, dtype=np.int64)
    rank_of[placed[::-1]] = computing[::-1]  # of several ranks the first
    return rank_of, placed, computing


def check_location(plan: Plan, location: np.ndarray, rank: int, held: SampleBatch) -> None:
    """Raises `DataError` unless `held` has exactly the samples of `plan` whose `location` is `rank`."""
    is_held = held.find(plan.ids)[1].numpy()
    is_local = location == rank
    if (absent := plan.ids[is_local & ~is_held]).size:
        raise DataError(f"The plan locates sample ids {_first_ids(absent)} here, but this rank's batch lacks them.")
    if (foreign := np.flatnonzero(~is_local & is_held)).size:
        raise DataError(
            f"This rank's batch holds sample ids {_first_ids(plan.ids[foreign])}, which the plan locates on rank "
            f"{location[foreign[0]]}: each sample lies on one rank."
        )


def check_lengths(plan: Plan, held: SampleBatch) -> None:
    """Raises `DataError` if samples of `held` have other lengths than in `plan`."""
    rows, is_held = held.find(plan.ids)
    index = np.flatnonzero(is_held.numpy())
    actual, planned = held.lengths[rows[index]].numpy(), plan.lengths[index]
    if (bad := np.flatnonzero(actual != planned)).size:
        first = bad[0]
        raise DataError(
            f"Sample id {plan.ids[index[first]]} has {actual[first]} tokens here, but the plan was made for "
            f"{planned[first]} ({bad.size} samples differ in all). Plan again, from gather_lengths of the batch."
        )


def _locate(routes: Routes, plan: Plan, dp_group: ExchangeGroup, held: SampleBatch, what: str) -> Routes:
    """`routes` with `location`; if the plan has none, from an all-gather of the ids that each rank holds."""
    if plan.location is not None:
        return routes
    holders = dp_group.all_gather(held.find(plan.ids)[1].to(torch.uint8)).numpy()
    counts = holders.sum(0, dtype=np.int64)
    with dp_group.consensus(what):
        if (repeated := np.flatnonzero(counts > 1)).size:
            ranks = np.flatnonzero(holders[:, repeated[0]]).tolist()
            raise DataError(
                f"Sample id {plan.ids[repeated[0]]} is held by data-parallel ranks {ranks} "
                f"({repeated.size} such ids in all). Each sample lies on one rank."
            )
        if (missing := np.flatnonzero((counts == 0) & (routes.rank_of >= 0))).size:
            raise DataError(f"No rank holds sample ids {_first_ids(plan.ids[missing])}: pass like=, the planned batch.")
    location = np.where(counts == 1, holders.argmax(0), -1).astype(np.int64)
    return replace(routes, location=location)


def results_in_plan_order(results: SampleBatch, plan: Plan, routes: Routes) -> SampleBatch:
    """Results of the samples that this rank counts, in plan order, padded from a truncated length to the full one."""
    rows, is_present = results.find(plan.ids)
    has_result = is_present.numpy()
    is_own = np.zeros(len(plan.ids), dtype=bool)
    is_own[routes.assigned] = True
    foreign = np.flatnonzero(has_result & (routes.rank_of >= 0) & ~is_own)
    if foreign.size:
        raise DataError(
            f"Results for sample ids {_first_ids(plan.ids[foreign])}, which the plan gives to rank "
            f"{routes.rank_of[foreign[0]]}: hand in the results of this rank's own samples."
        )
    assigned = routes.counted[routes.rank_of[routes.counted] == routes.rank]
    if (absent := plan.ids[assigned[~has_result[assigned]]]).size:
        raise DataError(f"No results for sample ids {_first_ids(absent)}: hand in one for each sample of this rank.")
    ordered = results.select(rows[assigned])
    full_lengths = torch.from_numpy(plan.lengths[assigned])
    if (longer := (ordered.lengths > full_lengths).nonzero().flatten()).numel():
        first = int(longer[0])
        raise DataError(
            f"The result for sample id {int(ordered.ids[first])} has {int(ordered.lengths[first])} rows, the sample "
            f"{int(full_lengths[first])} tokens ({longer.numel()} results are too long in all)."
        )
    if bool((ordered.lengths == full_lengths).all()):
        return ordered
    starts = starts_of(full_lengths)
    index = row_indices(starts[:-1], ordered.lengths)
    fields = {
        name: place(ordered[name], index, int(starts[-1]), spec.pad) if spec.per_token else ordered[name]
        for name, spec in ordered.schema.items()
    }
    return SampleBatch(ordered.ids, full_lengths, fields, ordered.schema)


# ---- exchange


def select_samples(batch: SampleBatch, plan: Plan, samples: np.ndarray) -> SampleBatch:
    """The plan's `samples` out of `batch`; they may repeat."""
    # Several ranks may receive one sample; the ids of a batch must differ.
    return batch.select(batch.rows_of(plan.ids[samples]), ids=np.arange(samples.size))


def exchange_fields(
    samples: SampleBatch,
    plan: Plan,
    dp_group: ExchangeGroup,
    to_rank: np.ndarray,
    incoming: np.ndarray,
    from_rank: np.ndarray,
) -> dict[str, Any]:
    """Sends `samples` and returns the received fields. Collective.

    Args:
        samples: sorted by `to_rank`.
        plan: has the lengths of all samples.
        dp_group: the group.
        to_rank: int64 `[samples]`.
        incoming: the plan's samples that this rank receives, sorted by `from_rank`.
        from_rank: int64 `[incoming]`.
    """
    sent_lengths = samples.lengths.numpy()
    received_lengths = plan.lengths[incoming]

    def per_rank(ranks: np.ndarray, weights: np.ndarray) -> list[int]:
        sums = np.zeros(dp_group.size, dtype=np.int64)
        np.add.at(sums, ranks, weights)
        return sums.tolist()

    by_sample = per_rank(to_rank, np.ones_like(sent_lengths)), per_rank(from_rank, np.ones_like(received_lengths))
    by_token = per_rank(to_rank, sent_lengths), per_rank(from_rank, received_lengths)
    fields = dict(samples.fields)
    schema = sorted(samples.schema.items())  # ranks may have added their fields in different orders
    for name, spec in schema:
        if spec.kind not in ("static", "rows"):
            by_rank = by_token if spec.per_token else by_sample
            fields[name] = dp_group.all_to_all(fields[name].detach(), *by_rank)
    for name, spec in schema:
        if spec.counts is not None:  # its counts have arrived
            received = as_index(fields[spec.counts], "counts").numpy()
            by_rank = per_rank(to_rank, samples.rows_per_sample(name).numpy()), per_rank(from_rank, received)
            fields[name] = dp_group.all_to_all(fields[name].detach(), *by_rank)
    return fields


def assemble(
    fields: dict[str, Any], results: SampleBatch, plan: Plan, held: np.ndarray, received: np.ndarray
) -> SampleBatch:
    """The samples `held`, with the fields of those `received` and padding elsewhere.

    `results` has the schema; `held` and `received` are indices into the plan.
    """
    lengths = torch.from_numpy(plan.lengths[held])
    starts = starts_of(lengths)
    row_of = np.full(len(plan.ids), -1, dtype=np.int64)
    row_of[held] = np.arange(held.size)
    rows = torch.from_numpy(row_of[received])
    tokens = row_indices(starts[:-1][rows], lengths[rows])

    def scatter(values: Any, spec: FieldSpec) -> Any:
        if spec.kind == "static":
            return values
        if spec.per_token:
            return place(values, tokens, int(starts[-1]), spec.pad)
        if spec.counts is not None:
            counts = as_index(fields[spec.counts], "counts")
            starts_of_rows = starts_of(place(counts, rows, held.size, 0))
            return place(values, row_indices(starts_of_rows[:-1][rows], counts), int(starts_of_rows[-1]), spec.pad)
        return place(values, rows, held.size, spec.pad)

    scattered = {name: scatter(fields[name], spec) for name, spec in results.schema.items()}
    return SampleBatch(plan.ids[held], lengths, scattered, results.schema)


# ---- checks


def require_plan(value: object) -> None:
    """Raises `DataError` unless `value` is a Plan."""
    if not (hasattr(value, "fingerprint") and hasattr(value, "rank_samples")):
        raise DataError(f"plan is a {type(value).__name__}: pass the Plan that strategy.plan or plan_step returns.")


def state_facts(facts: Facts, batch: SampleBatch, plan: Plan) -> None:
    """States what must be equal on all ranks before `batch` is sent by `plan`."""
    for name, description in batch.describe(static_values=True).items():
        facts.equal(f"field {name!r}", description)
    facts.equal("the plan", plan.fingerprint, "Plan on all ranks from the same lengths, or on one and send the plan")
    # The fingerprint does not cover the location, and ranks with different ones would wait for each other forever.
    location = None if plan.location is None else hashlib.sha256(plan.location.tobytes()).hexdigest()[:16]
    facts.equal("the plan's location", location)


def _first_ids(ids: np.ndarray) -> str:
    return first_of([str(sample) for sample in ids.tolist()], 8, ", ")
