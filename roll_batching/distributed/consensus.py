"""Collective error handling: an error on one rank becomes the same error on all ranks.

Between two collectives a rank can fail alone, and the others would wait for it until the timeout. Code that can fail so
runs inside

    with consensus(group, "train_step") as facts:
        packs = pack(...)                                # may raise, on any rank
        facts.equal("the plan", plan.fingerprint)        # must be the same on all ranks

which costs one small all-reduce. Messages are exchanged only after a failure or a difference. The block must not
contain collectives: a rank that fails before one would leave the others waiting in it.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from roll_batching.distributed.groups import gather_objects, group_device
from roll_batching.errors import RankError, RollBatchingError, first_of
from roll_batching.registry import user_place

T = TypeVar("T")
Failure = (Exception, SystemExit)
"""Errors that are shared with the other ranks. A KeyboardInterrupt reaches every rank anyway."""


def digest(*parts: bytes | str) -> int:
    """A non-negative 62-bit hash of `parts`, equal on ranks that pass the same."""
    state = hashlib.blake2b(digest_size=8)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "little"))  # so that ("ab", "c") and ("a", "bc") differ
        state.update(data)
    return int.from_bytes(state.digest(), "little") >> 2


class Facts:
    """Values of one rank that must be equal on other ranks, by label."""

    def __init__(self) -> None:
        self.everywhere: dict[str, str] = {}
        self.in_replica: dict[str, str] = {}
        self.cures: dict[str, str] = {}
        self.counted = self.total = torch.zeros(0, dtype=torch.float64)
        self.balance, self.imbalance_message = 0, ""

    def equal(self, label: str, value: Any, cure: str = "") -> None:
        """Requires `str(value)` to be equal on all ranks; the error ends with `cure`."""
        self.everywhere[label], self.cures[label] = str(value), cure

    def equal_in_replica(self, label: str, value: Any, cure: str = "") -> None:
        """Requires `str(value)` to be equal on all ranks of a replica (`Team.agree`); `cure` as in `equal`."""
        self.in_replica[label], self.cures[label] = str(value), cure

    def count(self, numbers: torch.Tensor) -> None:
        """Adds up fp64 `numbers` [n] of this rank's replica over replicas, into `total`. For `Team.agree` only."""
        self.counted = numbers

    def balanced(self, number: int, message: str) -> None:
        """Requires the numbers of all replicas to add up to 0, else all raise `message`. For `Team.agree` only.

        So n replicas prove that they hold the same samples: one passes (n - 1) x their digest, the others -digest.
        """
        self.balance, self.imbalance_message = number, message

    def digest_pairs(self) -> list[int]:
        """Digest of what all ranks must share and of what a replica's ranks must share, each followed by its negative.

        After a MAX all-reduce (max, -min), a pair that no longer sums to 0 shows disagreement.
        """
        everywhere = digest(repr(sorted(self.everywhere.items())))
        in_replica = digest(repr(sorted(self.in_replica.items())))
        return [everywhere, -everywhere, in_replica, -in_replica]


@contextlib.contextmanager
def consensus(group: Any, what: str, *, patience: float | None = None) -> Iterator[Facts]:
    """Raises an error of any rank's block on all ranks of `group`. Collective.

    Args:
        group: the ranks that must agree; None for a single process.
        what: the operation's name, for errors.
        patience: seconds to wait for the slowest rank, where that is longer than the timeout of `group` (gloo).

    Raises:
        RankError: on all ranks, with the same message, if a rank fails or facts differ; it names global ranks. In a
            group of one rank, the block's own error.
    """
    facts = Facts()
    if group is None or dist.get_world_size(group) == 1:
        yield facts
        return
    error: BaseException | None = None
    try:
        yield facts
    except Failure as caught:
        error = caught
    _wait(group, patience)
    # Success costs one small all-reduce; texts are pickled and gathered only after a failure.
    if not _all_agree(group, error, facts):
        raise_on_all(group, what, error, facts)


def raise_on_all(group: Any, what: str, error: BaseException | None, facts: Facts, replica: int = 0) -> NoReturn:
    """Raises one `RankError` on all ranks of `group`, from each rank's `error`, or their `facts`. Collective.

    `replica` is the index of this rank's replica.
    """
    message = None if error is None else failure_message(error)
    everyone = gather_objects((message, replica, facts.everywhere, facts.in_replica, facts.cures), group)
    ranks = dist.get_process_group_ranks(group)
    raise RankError(f"{what}: {_explain(ranks, everyone)}") from error


def exchange(group: Any, what: str, make: Callable[[], T], *, patience: float | None = None) -> list[T]:
    """All-gathers the return values of `make`, pickled, in the order of ranks. Collective.

    `what` and `patience` are those of `consensus`. Raises `RankError` on all ranks, with the same message, if `make`
    fails on any; in a group of one rank, `make`'s own error.
    """
    if group is None or dist.get_world_size(group) == 1:
        return [make()]
    error, value = None, None
    try:
        value = make()
    except Failure as caught:
        error = caught
    _wait(group, patience)
    everyone = gather_objects((None if error is None else failure_message(error), value), group)
    failures = {
        rank: message
        for rank, (message, _) in zip(dist.get_process_group_ranks(group), everyone, strict=True)
        if message is not None
    }
    if failures:
        raise rank_error(what, failures) from error
    return [value for _, value in everyone]


def rank_error(what: str, failures: Mapping[int, str]) -> RankError:
    """The error for ranks that failed in `what`, from their messages by global rank."""
    return RankError(f"{what}: {_group_messages(sorted(failures), [failures[rank] for rank in sorted(failures)])}")


def _wait(group: Any, patience: float | None) -> None:
    """Waits for all ranks if `patience` is given: the group's own timeout starts after that."""
    if patience is not None:
        dist.monitored_barrier(group, timeout=datetime.timedelta(seconds=patience))


def _all_agree(group: Any, error: BaseException | None, facts: Facts) -> bool:
    """Whether no rank has an error and all facts are equal. One MAX all-reduce."""
    device = group_device(group, torch.device("cpu"))
    votes = torch.tensor([int(error is not None), *facts.digest_pairs()], dtype=torch.int64, device=device)
    dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=group)
    failed, *pairs = votes.tolist()
    return not failed and all(high == -low for high, low in zip(pairs[::2], pairs[1::2], strict=True))


def failure_message(error: BaseException) -> str:
    """The text of an error for other ranks."""
    if isinstance(error, SystemExit):
        return f"SystemExit: code called exit({error.code!r}), which would end the job as if it were done"
    if isinstance(error, RollBatchingError):
        return f"{type(error).__name__}: {error}"
    place = user_place(error)
    return f"{type(error).__name__}: {error}" + (f" ({place})" if place else "")


def _explain(ranks: Sequence[int], everyone: Sequence[Any]) -> str:
    """The errors if a rank has one, else the facts that differ and on which ranks."""
    messages = [message for message, *_ in everyone]
    if any(messages):
        return _group_messages(ranks, messages)
    differences = describe_differences(ranks, [facts for _, _, facts, _, _ in everyone])
    for replica in sorted({replica for _, replica, *_ in everyone}):
        members = [i for i, (_, member_replica, *_) in enumerate(everyone) if member_replica == replica]
        differences |= describe_differences([ranks[i] for i in members], [everyone[i][3] for i in members])
    cures = {label: cure for *_, rank_cures in everyone for label, cure in rank_cures.items()}
    return "; ".join(
        f"ranks differ in {label}: {values}" + (f". {cures[label]}" if cures.get(label) else "")
        for label, values in differences.items()
    )


def describe_differences(ranks: Sequence[int], facts: Sequence[dict[str, str]]) -> dict[str, str]:
    """Text for each fact that differs between these ranks, by label: its values, and the ranks of each."""
    differences = {}
    for label in sorted({label for rank_facts in facts for label in rank_facts}):
        ranks_of: dict[str, list[int]] = {}
        for rank, rank_facts in zip(ranks, facts, strict=True):
            ranks_of.setdefault(rank_facts.get(label, "absent"), []).append(rank)
        if len(ranks_of) > 1:
            differences[label] = ", ".join(
                f"{value} on {_format_ranks(ranks_with_value)}" for value, ranks_with_value in ranks_of.items()
            )
    return differences


def _group_messages(ranks: Sequence[int], messages: Sequence[str | None]) -> str:
    """The messages, equal ones once, each with its ranks."""
    ranks_of: dict[str, list[int]] = {}
    for rank, message in zip(ranks, messages, strict=True):
        if message is not None:
            ranks_of.setdefault(message, []).append(rank)
    return "; ".join(f"{_format_ranks(same_message)}: {message}" for message, same_message in ranks_of.items())


def _format_ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {first_of([str(rank) for rank in ranks], 8, ', ')}"
