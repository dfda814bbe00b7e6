"""Games of environments: Sokoban's rooms and rules, gem's environments, and FrozenLake in words."""

from __future__ import annotations

import sys
from collections import deque
from typing import Any

import pytest

from roll_batching.errors import DataError
from roll_batching.jobs.rollouts.environments import FrozenLake
from roll_batching.jobs.rollouts.games import Gem, Sokoban

ROOM = """
########
#@_$_.##
#__$__.#
########
""".strip()


def room_of(text: str) -> Sokoban:
    """The room that `text` shows."""
    rows = text.split("\n")
    places = {(i, j): tile for i, row in enumerate(rows) for j, tile in enumerate(row) if tile != "#"}
    room = Sokoban((len(rows), len(rows[0])), boxes=sum(tile in "$*" for tile in places.values()))
    room.floor = set(places)
    (room.player,) = (place for place, tile in places.items() if tile in "@+")
    room.places = {place for place, tile in places.items() if tile in "$*"}
    room.targets = frozenset(place for place, tile in places.items() if tile in ".*+")
    return room


def shortest_way(text: str) -> list[str] | None:
    """Moves that solve the room, found by trying all; None: it has no solution."""
    ways = deque([(text, list[str]())])
    seen = {text}
    while ways:
        text, way = ways.popleft()
        for move in Sokoban.MOVES:
            after, _, is_over, _, _ = room_of(text).step(move)
            if is_over:
                return [*way, move]
            if after not in seen:
                seen.add(after)
                ways.append((after, [*way, move]))
    return None


def test_a_box_is_pushed_onto_its_target():
    room = room_of(ROOM)
    rewards = [room.step(move) for move in ("Right", " right ", "right", "Left", "fly", "up")]
    assert [reward for _, reward, *_ in rewards] == pytest.approx([-0.1, -0.1, 0.9, -0.1, -0.1, -0.1])
    assert [facts["valid"] for *_, facts in rewards] == [True, True, True, True, False, True]
    assert rewards[2][0].split("\n")[1] == "#___@*##" and not any(over for _, _, over, _, _ in rewards)
    room = room_of("#####\n#@*_#\n#####")
    assert room.step("right") == ("#####\n#_+$#\n#####", -1.1, False, False, {"solved": False, "valid": True})


def test_boxes_stop_each_other_and_walls_stop_all():
    room = room_of("######\n#@$$.#\n####.#\n######")
    for move in ("right", "left", "up"):
        assert room.step(move)[0] == "######\n#@$$.#\n####.#\n######"


def test_the_last_box_ends_the_episode():
    text, reward, is_over, is_cut, facts = room_of("#####\n#@$.#\n#####").step("right")
    assert (text, reward, is_over, is_cut) == ("#####\n#_@*#\n#####", pytest.approx(10.9), True, False)
    assert facts["solved"]


@pytest.mark.parametrize("seed", range(12))
def test_a_room_is_its_seeds_and_has_a_solution(seed):
    text, facts = Sokoban((6, 6), boxes=1 + seed % 2).reset(seed=seed, options={})
    assert text == Sokoban((6, 6), boxes=1 + seed % 2).reset(seed=seed, options={})[0]
    assert text != Sokoban((6, 6), boxes=1 + seed % 2).reset(seed=seed + 1, options={})[0]
    assert text.count("$") == 1 + seed % 2 and "*" not in text and "@" in text + facts["instruction"]
    assert {row[0] + row[-1] for row in text.split("\n")} == {"##"} and set(text.split("\n")[0]) == {"#"}
    assert shortest_way(text) is not None


def test_rooms_without_a_place_are_refused():
    with pytest.raises(DataError, match="a room of 4 x 4 has no place for 3 boxes and a player"):
        Sokoban((4, 4), boxes=3)
    with pytest.raises(DataError, match="1000 rooms of 6 x 6 left a box on a target: raise pulls"):
        Sokoban((6, 6), boxes=1, pulls=0).reset(seed=0, options={})


def test_the_lake_in_words():
    lake = FrozenLake(size=3, has_words=True, is_slippery=True)
    text, facts = lake.reset(seed=4, options={})
    assert text.split("\n")[0][0] == "P" and "slippery" in facts["instruction"] and "Left, Down" in facts["instruction"]
    assert lake.step("r")[4]["valid"] is False and lake.step(" Right ")[4]["valid"] is True


def test_games_of_gem_begin_by_the_seed():
    pytest.importorskip("gem")
    name: Any = "game:GuessTheNumber-v0"
    games = [Gem(name, min_number=1, max_number=20, max_turns=5) for _ in range(3)]
    starts = [game.reset(seed=seed, options={})[0] for game, seed in zip(games, (3, 3, 4), strict=True)]
    assert starts[0] == starts[1] and starts[0].endswith("Enter your next guess.")
    hints = [[game.step(f"\\boxed{{{guess}}}")[:3] for guess in (10, 5)] for game in games[:2]]
    assert hints[0] == hints[1] and "10" in hints[0][0][0]
    questions = [Gem("rg:letter_counting", size=5, seed=42).reset(seed=seed, options={})[0] for seed in (3, 3, 4)]
    assert questions[0] == questions[1] != questions[2]


def test_gem_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "gem", None)  # as where it is not installed
    with pytest.raises(DataError, match="game:A needs gem: pip install gem-llm"):
        Gem("game:A").reset(seed=1, options={})
