"""Games for `environments:rollout`, in texts for language models: Sokoban, and the environments of gem."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from roll_batching.errors import DataError

_MOST_DRAWS = 1000
"""Rooms that are drawn until every box of one is off the targets."""
_FLOOR_SHARE = 0.6
"""Share of the places inside the outer walls that are floor."""


class Sokoban:
    """Sokoban as text, in a room that the episode's seed draws.

    `#` is a wall, `_` floor, `.` a target, `$` a box, `*` a box on a target, `@` and `+` the player. Actions are Up,
    Down, Left and Right. Rewards are gym-sokoban's: -0.1 a turn, 1 for a box pushed onto a target, -1 for one pushed
    off, and 10 at the end, when all are on targets. Boxes were pulled off their targets: a room has a solution.

    Args:
        size: rows and columns, with the outer walls.
        boxes: boxes, and as many targets.
        pulls: random moves of the reverse game; more give harder rooms.
    """

    MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
    INSTRUCTION = (
        "You solve a Sokoban puzzle: push every box onto a target. Walk into a box to push it; it moves if the place "
        "behind it is free, and it cannot be pulled. Map: # is a wall, _ floor, . a target, $ a box, * a box on a "
        "target, @ you, + you on a target. Each answer is one of Up, Down, Left, Right."
    )

    def __init__(self, size: Sequence[int] = (10, 10), boxes: int = 4, pulls: int = 100) -> None:
        rows, columns = size
        self.floor_size = max(boxes + 2, int((rows - 2) * (columns - 2) * _FLOOR_SHARE))
        if boxes < 1 or min(rows, columns) < 3 or self.floor_size > (rows - 2) * (columns - 2):
            raise DataError(f"Sokoban: a room of {rows} x {columns} has no place for {boxes} boxes and a player")
        self.rows, self.columns, self.boxes, self.pulls = rows, columns, boxes, pulls

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
        """Draws the room by `seed`."""
        rng = np.random.default_rng(seed)
        for _ in range(_MOST_DRAWS):
            self._draw(rng)
            if not self.places & self.targets:
                return self._text(), {"instruction": self.INSTRUCTION}
        cure = "raise pulls, enlarge the room, or use fewer boxes"
        raise DataError(f"Sokoban: {_MOST_DRAWS} rooms of {self.rows} x {self.columns} left a box on a target: {cure}")

    def _draw(self, rng: np.random.Generator) -> None:
        """Draws floor by a random walk, then targets, and pulls a box off each."""
        steps = list(self.MOVES.values())
        here = int(rng.integers(1, self.rows - 1)), int(rng.integers(1, self.columns - 1))
        self.floor = {here}
        while len(self.floor) < self.floor_size:
            row, column = _add(here, steps[rng.integers(4)])
            if 0 < row < self.rows - 1 and 0 < column < self.columns - 1:
                here = row, column
                self.floor.add(here)
        order = sorted(self.floor)
        self.player, *targets = (order[i] for i in rng.permutation(len(order))[: self.boxes + 1])
        self.targets, self.places = frozenset(targets), set(targets)
        for _ in range(self.pulls):
            step = steps[rng.integers(4)]
            ahead, behind = _add(self.player, step), _add(self.player, (-step[0], -step[1]))
            if ahead not in self.floor or ahead in self.places:
                continue
            if behind in self.places and rng.random() < 0.5:
                self.places.remove(behind)
                self.places.add(self.player)
            self.player = ahead

    def step(self, action: str) -> tuple[str, float, bool, bool, Mapping[str, Any]]:
        """Moves by the action's word."""
        step, reward = self.MOVES.get(action.strip().lower()), -0.1
        if step is not None:
            ahead = _add(self.player, step)
            beyond = _add(ahead, step)
            if ahead in self.places and beyond in self.floor and beyond not in self.places:
                self.places.remove(ahead)
                self.places.add(beyond)
                reward += (beyond in self.targets) - (ahead in self.targets)
            if ahead in self.floor and ahead not in self.places:
                self.player = ahead
        is_solved = self.places == self.targets
        return self._text(), reward + 10 * is_solved, is_solved, False, {"solved": is_solved, "valid": step is not None}

    def _text(self) -> str:
        return "\n".join("".join(self._tile((i, j)) for j in range(self.columns)) for i in range(self.rows))

    def _tile(self, place: tuple[int, int]) -> str:
        if place not in self.floor:
            return "#"
        tiles = "@+" if place == self.player else "$*" if place in self.places else "_."
        return tiles[place in self.targets]


def _add(place: tuple[int, int], step: tuple[int, int]) -> tuple[int, int]:
    return place[0] + step[0], place[1] + step[1]


_SEEDED = threading.Lock()
"""Held while gem, which seeds the random numbers of the whole process, begins an episode."""


class Gem:
    """The environment `name` of gem (gem-llm); a `seed` among its arguments becomes the episode's."""

    def __init__(self, name: str, **arguments: Any) -> None:
        self.name, self.arguments = name, arguments

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
        """Makes the environment, and begins its episode."""
        try:
            import gem
        except ImportError as error:
            raise DataError(f"{self.name} needs gem: pip install gem-llm") from error
        arguments = {name: seed if name == "seed" else value for name, value in self.arguments.items()}
        with _SEEDED:
            self.game = gem.make(self.name, **arguments)
            text, facts = self.game.reset(seed=seed)
        return _append_suffix(text, facts), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, Mapping[str, Any]]:
        """Acts by the text; gem finds the action in it."""
        text, reward, is_over, is_cut, facts = self.game.step(action)
        return _append_suffix(text, facts), float(reward), bool(is_over), bool(is_cut), {}


def _append_suffix(text: str, facts: Mapping[str, Any]) -> str:
    return f"{text}\n{facts['suffix']}" if facts.get("suffix") else str(text)
