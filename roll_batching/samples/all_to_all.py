"""Samples travel to the ranks that a plan chose, and results travel home: `distribute` and `collect`.

Both first agree (see `distributed.consensus`), then move each field in one all-to-all of bytes, so that every dtype
travels on every backend. Nothing about shapes is exchanged: the plan knows all lengths.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from roll_batching.distributed import Facts
from roll_batching.errors import DataError
from roll_batching.samples.batch import SampleBatch
from roll_batching.samples.exchange_group import Peers
from roll_batching.samples.fields import FieldSpec
from roll_batching.samples.length_table import require_batch
from roll_batching.samples.ragged import place, row_indices, starts_of

if TYPE_CHECKING:
    from roll_batching.planning import Plan


def distribute(batch: SampleBatch, plan: Plan, group: Any = None) -> SampleBatch:
    """Move samples to the data-parallel ranks that `plan` chose. Collective.

    Args:
        batch: the samples that lie here now; may be empty, and may hold more samples than the plan names
            (the others stay behind), so that a mini-batch is taken out of a rollout batch.
        plan: the same on all ranks. `plan.location` (from a `LengthTable`) says who holds what; when it is
            None, the ranks find out in one more small exchange.
        group: by default Megatron's data-parallel group, else all processes, else this one alone.

    Returns:
        This rank's samples in plan order (`plan.rank_samples`), whole (truncation takes effect when they are
        packed), on the device they came from. Samples in `plan.dropped` are not sent.

    Raises:
        RankError: on all ranks alike, before data move (`DataError` in a single process): ids that nobody
            holds or two ranks hold, a batch or lengths that contradict the plan, plans, schemas, dtypes or
            static values that differ between ranks.
    """
    peers = Peers.of(group)
    with peers.consensus("distribute") as facts:
        require_batch("distribute", batch)
        require_plan(plan)
        state_facts(facts, batch, plan)
        routes = _routes(plan, peers, batch)
    routes = _locate(routes, plan, peers, batch, "distribute")
    send = routes.outgoing
    samples = batch.select_ids(plan.ids[send])
    mine = routes.mine
    order = np.argsort(routes.location[mine], kind="stable")
    fields = exchange_fields(samples, plan, peers, routes.rank_of[send], mine[order], routes.location[mine[order]])
    inverse = np.argsort(order, kind="stable")
    arrived = SampleBatch(plan.ids[mine[order]], plan.lengths[mine[order]], fields, batch.schema)
    return arrived.select(inverse)


def collect(results: SampleBatch, plan: Plan, group: Any = None, *, like: SampleBatch | None = None) -> SampleBatch:
    """Bring results home, into the order of the batch that was distributed. Collective.

    Args:
        results: what this rank computed for its samples, in any order. Fields of every kind travel.
        plan: the plan that `distribute` followed, the same on all ranks.
        group: as for `distribute`.
        like: the batch that was handed to `distribute`. Needed when the plan has no location; with it the
            order is that of `like`, without it that of the plan's samples (which for a plan made from
            `gather_lengths` is the same). Only its ids and lengths are read.

    Returns:
        One row for each of the plan's samples whose data lie on this rank, with the length it has at home.
        Where nothing was computed, fields read their pad value: all rows of dropped samples (see
        `plan.dropped`), the rows behind the cut of truncated ones.

    Raises:
        RankError: on all ranks alike, before data move (`DataError` in a single process): results missing
            for a sample of this rank, or for another rank's, or longer than the sample, and all of
            `distribute`.
    """
    peers = Peers.of(group)
    with peers.consensus("collect") as facts:
        require_batch("collect", results)
        require_plan(plan)
        if like is not None:
            require_batch("collect", like, "like")
        elif plan.location is None and peers.size > 1:
            raise DataError("The plan does not say where samples lie: pass like=, the batch that was distributed.")
        state_facts(facts, results, plan)
        facts.equal("whether like= is given", like is not None)
        routes = _routes(plan, peers, like)
        computed = results_in_plan_order(results, plan, routes)
    if like is not None:
        routes = _locate(routes, plan, peers, like, "collect")
    home = np.flatnonzero(routes.location == peers.rank)
    if like is not None:
        rows = like.rows_of(plan.ids[home])
        home = home[np.argsort(rows.numpy(), kind="stable")]
    mine = routes.mine
    order = np.argsort(routes.location[mine], kind="stable")
    arriving = routes.outgoing  # what left this rank is what comes back, in the same order
    fields = exchange_fields(
        computed.select(order), plan, peers, routes.location[mine[order]], arriving, routes.rank_of[arriving]
    )
    return assemble(fields, results, plan, home, arriving)


# ---- who sends what to whom


@dataclass(frozen=True)
class Routes:
    """Where the plan's samples lie and go. All arrays are int64; samples are indices into the plan."""

    location: np.ndarray
    """`[n]`: the rank that holds the data; -1 where not known yet."""

    rank_of: np.ndarray
    """`[n]`: the rank that the plan chose; -1 for dropped samples."""

    placed: np.ndarray
    """All placed samples by (rank, plan order)."""

    me: int

    @property
    def mine(self) -> np.ndarray:
        """The samples that this rank computes, in plan order."""
        return self.placed[self.rank_of[self.placed] == self.me]

    @property
    def outgoing(self) -> np.ndarray:
        """The samples that lie here and are computed anywhere, by (rank, plan order)."""
        return self.placed[self.location[self.placed] == self.me]


def _routes(plan: Plan, peers: Peers, held: SampleBatch | None) -> Routes:
    rank_of, placed = placement_of(plan, peers.size)
    if plan.location is not None:
        location = np.asarray(plan.location, dtype=np.int64)
        if held is not None:
            check_location(plan, location, peers.rank, held)
    else:
        location = np.full(len(plan.ids), 0 if held is None else -1, dtype=np.int64)
    if held is not None:
        check_lengths(plan, held)
    return Routes(location, rank_of, placed, peers.rank)


def placement_of(plan: Plan, size: int) -> tuple[np.ndarray, np.ndarray]:
    """`Routes.rank_of` and `Routes.placed` of a plan for `size` ranks, else `DataError`."""
    if len(plan.micro_batches) != size:
        raise DataError(f"The plan is for {len(plan.micro_batches)} data-parallel ranks, the group has {size}.")
    per_rank = [np.asarray(plan.rank_samples(rank), dtype=np.int64) for rank in range(size)]
    placed = np.concatenate(per_rank)
    rank_of = np.full(len(plan.ids), -1, dtype=np.int64)
    rank_of[placed] = np.repeat(np.arange(size), [samples.size for samples in per_rank])
    return rank_of, placed


def check_location(plan: Plan, location: np.ndarray, me: int, held: SampleBatch) -> None:
    """Raises `DataError` unless `held` are the samples of `plan` whose `location` is `me`."""
    found = held.find(plan.ids)[1].numpy()
    here = location == me
    if (absent := plan.ids[here & ~found]).size:
        raise DataError(f"The plan locates sample ids {_few(absent)} here, but this rank's batch lacks them.")
    if (foreign := np.flatnonzero(~here & found)).size:
        raise DataError(
            f"This rank's batch holds sample ids {_few(plan.ids[foreign])}, which the plan locates on rank "
            f"{location[foreign[0]]}: each sample lies on one rank."
        )


def check_lengths(plan: Plan, held: SampleBatch) -> None:
    """Raises `DataError` where samples of `held` have other lengths than in `plan`."""
    rows, found = held.find(plan.ids)
    index = np.flatnonzero(found.numpy())
    here, planned = held.lengths[rows[index]].numpy(), plan.lengths[index]
    if (bad := np.flatnonzero(here != planned)).size:
        first = bad[0]
        raise DataError(
            f"Sample id {plan.ids[index[first]]} has {here[first]} tokens here, but the plan was made for "
            f"{planned[first]} ({bad.size} samples differ in all). Plan again, from gather_lengths of the batch."
        )


def _locate(routes: Routes, plan: Plan, peers: Peers, held: SampleBatch, what: str) -> Routes:
    """Fill in where samples lie, when the plan does not say: all ranks tell which of its ids they hold."""
    if plan.location is not None:
        return routes
    holders = peers.all_gather(held.find(plan.ids)[1].to(torch.uint8)).numpy()
    times = holders.sum(0, dtype=np.int64)
    with peers.consensus(what):
        if (twice := np.flatnonzero(times > 1)).size:
            ranks = np.flatnonzero(holders[:, twice[0]]).tolist()
            raise DataError(
                f"Sample id {plan.ids[twice[0]]} is held by data-parallel ranks {ranks} "
                f"({twice.size} such ids in all). Each sample lies on one rank."
            )
        if (nobody := np.flatnonzero((times == 0) & (routes.rank_of >= 0))).size:
            raise DataError(f"No rank holds sample ids {_few(plan.ids[nobody])} of the plan.")
    location = np.where(times == 1, holders.argmax(0), -1).astype(np.int64)
    return Routes(location, routes.rank_of, routes.placed, routes.me)


def results_in_plan_order(results: SampleBatch, plan: Plan, routes: Routes) -> SampleBatch:
    """This rank's results in plan order, each stretched to its sample's length."""
    rows, found = results.find(plan.ids)
    here = found.numpy()
    elsewhere = np.flatnonzero(here & (routes.rank_of >= 0) & (routes.rank_of != routes.me))
    if elsewhere.size:
        raise DataError(
            f"Results for sample ids {_few(plan.ids[elsewhere])}, which the plan gives to rank "
            f"{routes.rank_of[elsewhere[0]]}: hand in the results of this rank's own samples."
        )
    mine = routes.mine
    if (absent := plan.ids[mine[~here[mine]]]).size:
        raise DataError(f"No results for sample ids {_few(absent)}, which the plan gives to this rank.")
    own = results.select(rows[mine])
    full = torch.from_numpy(plan.lengths[mine])
    if (longer := (own.lengths > full).nonzero().flatten()).numel():
        first = int(longer[0])
        raise DataError(
            f"The result for sample id {int(own.ids[first])} has {int(own.lengths[first])} rows, the sample "
            f"{int(full[first])} tokens ({longer.numel()} results are too long in all)."
        )
    if bool((own.lengths == full).all()):
        return own
    starts = starts_of(full)
    index = row_indices(starts[:-1], own.lengths)
    fields = {
        name: place(own[name], index, int(starts[-1]), spec.pad) if spec.per_token else own[name]
        for name, spec in own.schema.items()
    }
    return SampleBatch(own.ids, full, fields, own.schema)


# ---- the journey


def exchange_fields(
    samples: SampleBatch,
    plan: Plan,
    peers: Peers,
    to_rank: np.ndarray,
    arriving: np.ndarray,
    from_rank: np.ndarray,
) -> dict[str, Any]:
    """Send `samples` (sorted by `to_rank`) and return the fields of those `arriving` (by `from_rank`)."""
    lengths = samples.lengths.numpy()
    new_lengths = plan.lengths[arriving]

    def per_rank(ranks: np.ndarray, weights: np.ndarray) -> list[int]:
        sums = np.zeros(peers.size, dtype=np.int64)
        np.add.at(sums, ranks, weights)
        return sums.tolist()

    one, new_one = np.ones_like(lengths), np.ones_like(new_lengths)
    by_sample = per_rank(to_rank, one), per_rank(from_rank, new_one)
    by_token = per_rank(to_rank, lengths), per_rank(from_rank, new_lengths)
    fields: dict[str, Any] = {}
    for name, spec in samples.schema.items():
        values = samples.fields[name]
        if spec.kind == "static":
            fields[name] = values
        else:
            fields[name] = _all_to_all(values.detach(), *(by_token if spec.per_token else by_sample), peers)
    return fields


def _all_to_all(values: Tensor, send: list[int], receive: list[int], peers: Peers) -> Tensor:
    """Exchange rows of `values` `[sum(send), ...]`: gives `[sum(receive), ...]`, on the same device."""
    if peers.size == 1:
        return values
    shape = values.shape[1:]
    width = shape.numel() * values.element_size()
    if width == 0:
        return values.new_empty(sum(receive), *shape)
    device = peers.device_for(values)
    outgoing = values.contiguous().to(device).view(-1).view(torch.uint8)
    incoming = torch.empty(sum(receive) * width, dtype=torch.uint8, device=device)
    dist.all_to_all_single(
        incoming, outgoing, [n * width for n in receive], [n * width for n in send], group=peers.group
    )
    return incoming.view(values.dtype).view(sum(receive), *shape).to(values.device)


def assemble(
    fields: dict[str, Any], results: SampleBatch, plan: Plan, home: np.ndarray, arrived: np.ndarray
) -> SampleBatch:
    """Put the rows that `arrived` in their places among `home`; the others read pad."""
    lengths = torch.from_numpy(plan.lengths[home])
    starts = starts_of(lengths)
    row_of = np.full(len(plan.ids), -1, dtype=np.int64)
    row_of[home] = np.arange(home.size)
    rows = torch.from_numpy(row_of[arrived])
    tokens = row_indices(starts[:-1][rows], lengths[rows])

    def put(values: Any, spec: FieldSpec) -> Any:
        if spec.kind == "static":
            return values
        if spec.per_token:
            return place(values, tokens, int(starts[-1]), spec.pad)
        return place(values, rows, home.size, spec.pad)

    placed = {name: put(fields[name], spec) for name, spec in results.schema.items()}
    return SampleBatch(plan.ids[home], lengths, placed, results.schema)


# ---- words


def require_plan(value: object) -> None:
    """Raises `DataError` unless `value` is a Plan."""
    if not (hasattr(value, "fingerprint") and hasattr(value, "rank_samples")):
        raise DataError(f"plan is a {type(value).__name__}: pass the Plan that strategy.plan or plan_step returns.")


def state_facts(facts: Facts, batch: SampleBatch, plan: Plan) -> None:
    """What all ranks must have alike before `batch` moves by `plan`."""
    for name, words in batch.describe(static_values=True).items():
        facts.equal(f"field {name!r}", words)
    facts.equal("the plan", plan.fingerprint, "Plan on all ranks from the same lengths, or on one and send the plan")
    # A plan's fingerprint covers all but where samples lie, and a rank that is wrong there would hang.
    places = None if plan.location is None else hashlib.sha256(plan.location.tobytes()).hexdigest()[:16]
    facts.equal("the plan's location", places)


def _few(ids: np.ndarray | Sequence[int]) -> str:
    shown = ", ".join(str(int(i)) for i in ids[:8])
    return shown + (f" and {len(ids) - 8} more" if len(ids) > 8 else "")
