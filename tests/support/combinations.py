"""A covering design: few combinations of levels that together have every pair of levels that go together."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Case = dict[str, Any]
"""Levels by factor; a factor that is left out is off, at its first level."""
Level = tuple[str, Any]
Levels = tuple[Level, ...]


def levels_of(case: Case, size: int) -> set[Levels]:
    """Pairs, triples and so on of the levels of a case."""
    return set(itertools.combinations(case.items(), size))


@dataclass(frozen=True)
class Factors:
    """Factors with their levels, and what goes together."""

    levels: dict[str, tuple[Any, ...]]
    needs: dict[Level, dict[str, tuple[Any, ...]]]
    """By level, the levels of other factors of which it needs one; the first is taken."""
    is_possible: Callable[[Case, int], bool]
    """Of a case with all factors, and the most ranks."""

    def complete(self, case: Case) -> Case:
        """The case with all factors, in order."""
        return {name: case.get(name, levels[0]) for name, levels in self.levels.items()}

    def with_level(self, case: Case | None, level: Level, ranks: int) -> Case | None:
        """The case with one more level and what that needs; None where they do not go together."""
        name, value = level
        if case is None or name in case:
            return case if case is None or case[name] == value else None
        grown: Case | None = {**case, name: value}
        for needed, able in self.needs.get(level, {}).items():
            if grown is not None and grown.get(needed) not in able:
                grown = self.with_level(grown, (needed, able[0]), ranks)
        return grown if grown is not None and self.is_possible(self.complete(grown), ranks) else None

    def least(self, levels: Levels, ranks: int) -> Case | None:
        """The least case with some levels; None where they do not go together."""
        case: Case | None = {}
        for level in levels:
            case = self.with_level(case, level, ranks)
        return case

    def pairs(self, ranks: int) -> set[Levels]:
        """Pairs of levels that go together."""
        single = [(name, level) for name, levels in self.levels.items() for level in levels]
        apart = (pair for pair in itertools.combinations(single, 2) if pair[0][0] != pair[1][0])
        return {pair for pair in apart if self.least(pair, ranks) is not None}

    def fill(self, case: Case, missing: set[Levels], rng: random.Random, ranks: int) -> Case:
        """The case with levels for all factors, each the one with most of the missing pairs, else a random one."""
        order = list(self.levels)

        def gain(level: Level) -> int:
            pairs = (sorted((level, other), key=lambda one: order.index(one[0])) for other in case.items())
            return sum(tuple(pair) in missing for pair in pairs)

        for name in rng.sample(order, len(order)):
            for level in sorted(self.levels[name], key=lambda level: (-gain((name, level)), rng.random())):
                if (grown := self.with_level(case, (name, level), ranks)) is not None:
                    case = grown
                    break
        return self.complete(case)

    def draw(self, seed: int, ranks: int, more: int) -> list[Case]:
        """A greedy cover of all pairs, and `more` cases on twice the ranks for triples that it lacks."""
        rng, missing = random.Random(seed), self.pairs(ranks)
        chosen: list[Case] = []
        while missing:
            pairs = rng.sample(sorted(missing, key=str), min(6, len(missing)))
            least = (self.least(pair, ranks) for pair in pairs)
            cases = [self.fill(case, missing, rng, ranks) for case in least if case is not None]
            chosen.append(max(cases, key=lambda case: len(levels_of(case, 2) & missing)))
            missing -= levels_of(chosen[-1], 2)
        triples = set().union(*(levels_of(case, 3) for case in chosen))
        while more:
            names = rng.sample(list(self.levels), 3)
            triple = tuple((name, rng.choice(levels)) for name, levels in self.levels.items() if name in names)
            if triple not in triples and (case := self.least(triple, 2 * ranks)) is not None:
                chosen.append(self.fill(case, set(), rng, 2 * ranks))
                triples |= levels_of(chosen[-1], 3)
                more -= 1
        return chosen
