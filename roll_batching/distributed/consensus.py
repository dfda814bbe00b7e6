"""Ranks leave a piece of work together, or all of them raise the same error.

Between two collectives a rank can fail alone, and the others would wait for it. Whatever can fail so stands inside

    with consensus(group, "train_step") as facts:
        packs = pack(...)                                # may raise, on any rank
        facts.equal("the plan", plan.fingerprint)        # must be the same on all ranks

which costs one small all-reduce. Words are exchanged only when somebody failed or the facts differ. The block holds no
collective of its own: a rank that fails before it would leave the others waiting there.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from roll_batching.distributed.groups import group_device
from roll_batching.errors import RankError

T = TypeVar("T")
Failure = (Exception, SystemExit)
"""What a rank tells the others. A KeyboardInterrupt ends all of them anyway."""


def digest(*parts: bytes | str) -> int:
    """A non-negative 62-bit number of the given parts, equal on ranks that hold the same."""
    state = hashlib.blake2b(digest_size=8)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return int.from_bytes(state.digest(), "little") >> 2


class Facts:
    """What one rank states inside a `consensus`: by label, words that others must have as well."""

    def __init__(self) -> None:
        self.everywhere: dict[str, str] = {}
        self.in_part: dict[str, str] = {}
        self.cures: dict[str, str] = {}
        self.counted = self.total = torch.zeros(0, dtype=torch.float64)

    def equal(self, label: str, value: Any, cure: str = "") -> None:
        """`value`, as words, must be the same on all ranks; `cure` says what to do where it is not."""
        self.everywhere[label], self.cures[label] = str(value), cure

    def equal_in_part(self, label: str, value: Any, cure: str = "") -> None:
        """`value`, as words, must be the same on all ranks of this rank's part."""
        self.in_part[label], self.cures[label] = str(value), cure

    def count(self, numbers: torch.Tensor) -> None:
        """fp64 numbers [n] of this rank's part, to be added up over parts; for `Team.agree` alone."""
        self.counted = numbers

    def bounds(self) -> list[int]:
        """Digests of what must be the same everywhere and in this part, each with its negative: their maxima tell."""
        everywhere = digest(repr(sorted(self.everywhere.items())))
        here = digest(repr(sorted(self.in_part.items())))
        return [everywhere, -everywhere, here, -here]


@contextlib.contextmanager
def consensus(
    group: Any, what: str, *, part: int = 0, parts: int = 1, patience: float | None = None
) -> Iterator[Facts]:
    """What any rank of `group` raises inside becomes the same error on all. Collective.

    Args:
        group: the ranks that must agree; None for a process that is alone.
        what: names the work in errors.
        part: which of `parts` this rank belongs to (its replica, say), for `Facts.equal_in_part`.
        parts: the number of parts, the same on all ranks.
        patience: seconds that ranks may come apart inside, however short the timeout of `group`, a gloo group, is.

    Raises:
        RankError: on all ranks, with the same message, when any of them failed or their facts differ; it names the
            ranks by their global numbers. In a group of one, the block's own error.
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
    if _all_agree(group, error, facts, part, parts):
        return
    raise_as_one(group, what, error, facts, part)


def raise_as_one(group: Any, what: str, error: BaseException | None, facts: Facts, part: int) -> NoReturn:
    """Raises, on all ranks of `group`, one `RankError` of what each has to say. Collective."""
    message = None if error is None else words_of(error)
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, (message, part, facts.everywhere, facts.in_part, facts.cures), group=group)
    ranks = dist.get_process_group_ranks(group)
    raise RankError(f"{what}: {_explain(ranks, everyone)}") from error


def exchange(group: Any, what: str, make: Callable[[], T], *, patience: float | None = None) -> list[T]:
    """What `make` returns on each rank of `group`, in the order of its ranks. Collective.

    `what` and `patience` are those of `consensus`. Values travel pickled. Raises `RankError` on all ranks, with the
    same message, when `make` fails on any; in a group of one, `make`'s own error.
    """
    if group is None or dist.get_world_size(group) == 1:
        return [make()]
    error, mine = None, None
    try:
        mine = make()
    except Failure as caught:
        error = caught
    _wait(group, patience)
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, (None if error is None else words_of(error), mine), group=group)
    said = {
        rank: message
        for rank, (message, _) in zip(dist.get_process_group_ranks(group), everyone, strict=True)
        if message is not None
    }
    if said:
        raise together(what, said) from error
    return [value for _, value in everyone]


def together(what: str, said: Mapping[int, str]) -> RankError:
    """The error of ranks that failed in `what`, from the words of each."""
    return RankError(f"{what}: {_errors(sorted(said), [said[rank] for rank in sorted(said)])}")


def _wait(group: Any, patience: float | None) -> None:
    """With patience: returns when every rank is here. No collective, with the group's own timeout, begins before."""
    if patience is not None:
        dist.monitored_barrier(group, timeout=datetime.timedelta(seconds=patience))


def _all_agree(group: Any, error: BaseException | None, facts: Facts, part: int, parts: int) -> bool:
    """One all-reduce: whether nobody failed, and all facts are alike. Largest and smallest digest tell."""
    lowest = -(1 << 62)  # below every digest: what a rank says of the parts of others
    *everywhere, here, against = facts.bounds()
    largest = [int(error is not None), *everywhere, *[lowest] * (2 * parts)]
    largest[3 + 2 * part : 5 + 2 * part] = [here, against]
    votes = torch.tensor(largest, dtype=torch.int64, device=group_device(group, torch.device("cpu")))
    dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=group)
    failed, *bounds = votes.tolist()
    alike = all(high == -low or high == lowest for high, low in zip(bounds[::2], bounds[1::2], strict=True))
    return not failed and alike


def words_of(error: BaseException) -> str:
    """What the other ranks hear of an error."""
    if isinstance(error, SystemExit):
        return f"SystemExit: code called exit({error.code!r}), which would end the job as if it were done"
    return f"{type(error).__name__}: {error}"


def _explain(ranks: Sequence[int], everyone: Sequence[Any]) -> str:
    """The errors if there are some, else what differs between which ranks."""
    messages = [message for message, *_ in everyone]
    if any(messages):
        return _errors(ranks, messages)
    found = _differences(ranks, [facts for _, _, facts, _, _ in everyone])
    for part in sorted({part for _, part, *_ in everyone}):
        at = [i for i, (_, own, *_) in enumerate(everyone) if own == part]
        found |= _differences([ranks[i] for i in at], [everyone[i][3] for i in at])
    cures = {label: cure for *_, own in everyone for label, cure in own.items()}
    return "; ".join(
        f"ranks differ in {label}: {words}" + (f". {cures[label]}" if cures.get(label) else "")
        for label, words in found.items()
    )


def _differences(ranks: Sequence[int], facts: Sequence[dict[str, str]]) -> dict[str, str]:
    """By label, who says what, for the labels on which these ranks differ."""
    found = {}
    for label in sorted({label for own in facts for label in own}):
        alike: dict[str, list[int]] = {}
        for rank, own in zip(ranks, facts, strict=True):
            alike.setdefault(own.get(label, "absent"), []).append(rank)
        if len(alike) > 1:
            found[label] = ", ".join(f"{value} on {_named(who)}" for value, who in alike.items())
    return found


def _errors(ranks: Sequence[int], messages: Sequence[str | None]) -> str:
    alike: dict[str, list[int]] = {}
    for rank, message in zip(ranks, messages, strict=True):
        if message is not None:
            alike.setdefault(message, []).append(rank)
    return "; ".join(f"{_named(who)}: {message}" for message, who in alike.items())


def _named(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
