"""A rollout function for environments with texts as observations and actions, in the habit of gymnasium.

    rollout_function: roll_batching.jobs.rollouts.environments:rollout
    rollout_args: {environment: "my_game:Game", environment_args: {size: 4}, max_turns: 8}

Each rollout makes an environment of its own and plays one episode: the model reads the observation, its answer is the
action, and the environment answers with the next observation and a reward of the turn. Environments run in threads, so
one that takes its time delays no other.
"""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np

from roll_batching.errors import DataError
from roll_batching.jobs.rollouts.contract import Generation, RolloutClient, RolloutPrompt, RolloutSample
from roll_batching.jobs.texts import Tokenizer
from roll_batching.jobs.texts.chat import ChatTemplate, TemplateArguments
from roll_batching.planning.arrays import integer_of
from roll_batching.registry import load_dotted, printable

OBSERVATION, HISTORY, INSTRUCTION = "{observation}", "{history}", "{instruction}"
"""Places of texts in `observation_format`; `{turn}`, `{turns_done}` and `{turns_left}` are numbers."""
_PLACE = re.compile(r"\{(observation|history|instruction|turn|turns_done|turns_left)\}")


class Environment(Protocol):
    """One episode. Methods are called in one thread at a time, and not in the event loop's."""

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
        """Begins the episode; returns the first observation and what is known of it.

        `seed` is the same for all rollouts of a prompt; `options` is the prompt's line of the data file. Of the facts
        `instruction` is a text that precedes the first observation, or has its place in `observation_format`.
        """

    def step(self, action: str) -> tuple[str, float, bool, bool, Mapping[str, Any]]:
        """Acts by the model's text; returns observation, reward, whether it ended, whether it was cut off, and facts.

        Of the facts `state` is a key of the state for `adv_estimator: gigpo` (default: the observation), `valid` says
        whether the text was an action (`format_penalty`), and booleans of the last turn become marks, whose shares are
        metrics.
        """


@dataclass(frozen=True, kw_only=True)
class _Turn:
    """An observation, the model's answer, and what came of it."""

    text: str
    """The observation, in its format."""
    before: list[int]
    """Tokens that the model read before the observation."""
    seen: list[int]
    """Tokens of the observation; of the first in a chat they are in `before`."""
    made: Generation
    reward: float
    state: str | int
    story: str
    """What happened, as `{history}` tells it."""


async def rollout(
    prompt: RolloutPrompt,
    client: RolloutClient,
    tokenizer: Tokenizer,
    *,
    environment: str,
    environment_args: Mapping[str, Any] | None = None,
    max_turns: int = 8,
    history: int | None = None,
    observation_format: str = OBSERVATION,
    action_pattern: str | None = None,
    format_penalty: float = 0.0,
    chat: bool = False,
    system: str | None = None,
    template_args: Mapping[str, Any] | None = None,
) -> RolloutSample | list[RolloutSample]:
    """Plays one episode. Raises DataError where the first observation does not fit or has no place in its format.

    Args:
        environment: `package.module:name` of what makes an `Environment`, a class or function.
        environment_args: its keyword arguments.
        max_turns: most turns; an episode that is not over then is not finished.
        history: each turn is a sample of its own, which reads the prompt, this many turns before it and its
            observation. None: the episode is one sample, in which each turn reads all before it.
        observation_format: text around `{observation}`, in which `{turn}`, `{turns_done}`, `{turns_left}`,
            `{instruction}` (else it precedes the first) and `{history}` have places; a turn reads those before it as
            this text, not as tokens.
        action_pattern: regular expression, whose last group is the action. Text without a match is the action "".
        format_penalty: added to the reward of a turn without a match, or that the environment calls not `valid`.
        chat: an observation is a user's message, rendered by the tokenizer's chat template; the first comes after the
            messages of the prompt's line under `messages`, if it has any.
        system: with chat, the system message before all others.
        template_args: variables of the chat template; a line's `chat_template_kwargs` adds to them.
    """
    if not isinstance(observation_format, str) or OBSERVATION not in observation_format:
        raise DataError(f"observation_format is {observation_format!r}: it must contain {OBSERVATION}")
    max_turns = integer_of("max_turns", max_turns, 1, error=DataError)
    if history is not None:
        history = integer_of("history", history, 0, error=DataError)
    elif HISTORY in observation_format:
        raise DataError(f"observation_format has {HISTORY}: set history, the number of turns that it tells")
    pattern = _compile(action_pattern)
    speaker = _Chat(tokenizer, prompt, system, template_args or {}) if chat else _Plain(tokenizer, prompt)
    game: Environment = await asyncio.to_thread(load_dotted("environment", environment), **(environment_args or {}))
    try:
        observation, facts = await asyncio.to_thread(game.reset, seed=seed_of(prompt), options=prompt.record)
        _check_text("reset", observation)
        instruction = str(facts.get("instruction", ""))
        turns: list[_Turn] = []
        is_over = is_cut = False
        while not (is_over or is_cut) and len(turns) < max_turns:
            latest = turns if history is None else turns[max(0, len(turns) - history) :]
            values = {"turn": len(turns) + 1, "turns_done": len(turns), "turns_left": max_turns - len(turns)}
            texts = {"observation": observation, "history": ", ".join(turn.story for turn in latest)}
            form = observation_format
            if instruction and not turns and INSTRUCTION not in form:
                form = f"{INSTRUCTION}\n{form}"
            text = _fill(form, {**values, **texts, "instruction": instruction})
            before, seen = speaker.read([] if HISTORY in observation_format else latest, text)
            if not client.room([*before, *seen]):
                break
            made = await client.generate([*before, *seen])
            state, shown = facts.get("state", observation), observation
            action = _find_action(made.text, pattern)
            observation, reward, is_over, is_cut, facts = await asyncio.to_thread(game.step, action or "")
            _check_text("step", observation)
            reward = float(reward) + (format_penalty if action is None or not facts.get("valid", True) else 0)
            told = made.text if action is None else action
            story = f"(turn {len(turns) + 1}, observation: {shown}, action: {told}, reward: {reward:g})"
            turns.append(_Turn(text=text, before=before, seen=seen, made=made, reward=reward, state=state, story=story))
    finally:
        if hasattr(game, "close"):
            await asyncio.to_thread(game.close)
    if not turns:
        raise DataError(
            f"the environment's first observation, {printable(repr(observation), characters=60)}, leaves no room "
            "within sequence_length: raise it"
        )
    marks = {name: bool(value) for name, value in facts.items() if isinstance(value, (bool, np.bool_))}
    if history is None:
        return _sample(turns, finished=is_over, marks=marks)
    return [_sample([turn], finished=is_over, marks=marks) for turn in turns]


def _check_text(method: str, observation: Any) -> None:
    if not isinstance(observation, str):
        kind = printable(repr(observation), characters=60)
        raise DataError(f"the environment's {method} returned {kind} as the observation: return a text")


def _fill(form: str, values: Mapping[str, Any]) -> str:
    return _PLACE.sub(lambda place: str(values[place[1]]), form)


def _compile(pattern: str | None) -> re.Pattern[str] | None:
    """The regular expression `action_pattern`. Raises DataError for another text."""
    try:
        return None if pattern is None else re.compile(pattern, re.DOTALL)
    except (re.error, TypeError) as error:
        raise DataError(f"action_pattern {pattern!r} is no regular expression: {error}") from None


def _find_action(text: str, pattern: re.Pattern[str] | None) -> str | None:
    """The last group of the match in `text`, by default all of it; None without one."""
    if pattern is None:
        return text
    found = pattern.search(text)
    return None if found is None else (found[pattern.groups] or "").strip()


class _Plain:
    """Observations as texts behind the prompt."""

    def __init__(self, tokenizer: Tokenizer, prompt: RolloutPrompt) -> None:
        self._tokenizer, self._prompt = tokenizer, prompt.tokens

    def read(self, turns: Sequence[_Turn], text: str) -> tuple[list[int], list[int]]:
        """Tokens of the prompt and `turns`, and those of the observation `text` after them."""
        past = [token for turn in turns for token in (*self._tokenizer.encode(turn.text), *turn.made.tokens)]
        return [*self._prompt, *past], self._tokenizer.encode(text)


class _Chat:
    """Observations as a user's messages, by the chat template."""

    def __init__(
        self, tokenizer: Tokenizer, prompt: RolloutPrompt, system: str | None, values: Mapping[str, Any]
    ) -> None:
        self._tokenizer, self._template = tokenizer, ChatTemplate(tokenizer)
        self._first = [] if system is None else [{"role": "system", "content": system}]
        self._first += prompt.record.get("messages") or ()
        self._variables = TemplateArguments(values=values).of(prompt.record)
        if unread := sorted(self._variables.keys() - self._template.variables):
            raise DataError(f"template_args sets {unread[0]!r}, which the tokenizer's chat template does not read")

    def read(self, turns: Sequence[_Turn], text: str) -> tuple[list[int], list[int]]:
        """Tokens of the first messages and `turns`, and those of the observation `text`; together where it is first."""
        if not turns:
            message = {"role": "user", "content": text}
            return self._tokenizer.encode(self._template.prompt([*self._first, message], self._variables)), []
        before, seen = self.read(turns[:-1], turns[-1].text)
        return [*before, *seen, *turns[-1].made.tokens], self._following_tokens(turns[-1].made, text)

    def _following_tokens(self, made: Generation, text: str) -> list[int]:
        """What follows a turn of the model, whose own end token is not repeated."""
        tokens = self._tokenizer.encode(
            self._template.text_between_turns({"role": "user", "content": text}, self._variables)
        )
        return tokens[1:] if made.finished and tokens[:1] == made.tokens[-1:] else tokens


def seed_of(prompt: RolloutPrompt) -> int:
    """The episode's seed: the line's `seed`, or one of the prompt's text; the same for all rollouts of a prompt.

    Raises DataError for a seed that is no whole number, at least 0.
    """
    seed = prompt.record.get("seed")
    if seed is None:
        return zlib.crc32(prompt.text.encode())
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise DataError(f"seed is {printable(repr(seed), characters=60)}: give a whole number, at least 0, in the line")
    return seed


def _sample(turns: Sequence[_Turn], *, finished: bool, marks: Mapping[str, bool]) -> RolloutSample:
    """The sample of `turns`; observations are masked."""
    return RolloutSample(
        prompt_tokens=turns[0].before,
        tokens=[token for turn in turns for token in (*turn.seen, *turn.made.tokens)],
        loss_mask=[bit for turn in turns for bit in (*[0] * len(turn.seen), *[1] * len(turn.made.tokens))],
        log_probs=[value for turn in turns for value in (*[None] * len(turn.seen), *turn.made.log_probs)],
        reward=[turn.reward for turn in turns],
        states=[turn.state for turn in turns],
        finished=finished,
        marks=marks,
    )


@dataclass
class FrozenLake:
    """gymnasium's FrozenLake (toy text) as text: `S` start, `F` ice, `H` hole, `G` goal, `P` the player's place.

    An observation is the map, row by row, with the player in it. Actions are `l`, `d`, `r` and `u`; another text leaves
    the player where it is. The reward is 1 at the goal.

    Args:
        size: rows and columns; the map is drawn by the episode's seed, and has a way to the goal.
        ice: share of places that are no holes.
        is_slippery: moves go astray, two times out of three.
        shows_map: False: the observation is the place alone, a letter from `a`.
        has_words: for a language model: rows are lines, actions are Left, Down, Right and Up, and an instruction
            explains the map.
    """

    size: int = 4
    ice: float = 0.8
    is_slippery: bool = False
    shows_map: bool = True
    has_words: bool = False
    MOVES: ClassVar = ("left", "down", "right", "up")
    INSTRUCTION: ClassVar = (
        "You walk on a frozen lake to the goal and avoid the holes. Map: P is you, S the start, F ice, H a hole, G the "
        "goal. Each answer is one of Left, Down, Right, Up."
    )

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
        """Draws the map by `seed`, and begins at its start."""
        try:
            import gymnasium
            from gymnasium.envs.toy_text.frozen_lake import generate_random_map
        except ImportError as error:
            raise DataError("FrozenLake needs gymnasium: pip install 'roll-batching[environments]'") from error
        self.seed, self.rows = seed, generate_random_map(size=self.size, p=self.ice, seed=seed)
        self.game = gymnasium.make("FrozenLake-v1", desc=self.rows, is_slippery=self.is_slippery)
        self.place = int(self.game.reset(seed=seed)[0])
        text, facts = self._observation(arrived=False, valid=True)
        slippery = " Ice is slippery: you may go astray." * self.is_slippery
        return text, facts | ({"instruction": self.INSTRUCTION + slippery} if self.has_words else {})

    def step(self, action: str) -> tuple[str, float, bool, bool, Mapping[str, Any]]:
        """Moves by the action's word, or by its first letter."""
        moves = self.MOVES if self.has_words else [name[0] for name in self.MOVES]
        name = action.strip().lower() if self.has_words else action[:1]
        reward, is_over, is_cut = 0.0, False, False
        if name in moves:
            place, given, is_over, is_cut, _ = self.game.step(moves.index(name))
            self.place, reward = int(place), float(given)
        text, facts = self._observation(arrived=reward > 0, valid=name in moves)
        return text, reward, bool(is_over), bool(is_cut), facts

    def _observation(self, *, arrived: bool, valid: bool) -> tuple[str, dict[str, Any]]:
        facts: dict[str, Any] = {"state": f"{self.seed} {self.place}", "arrived": arrived, "valid": valid}
        if not self.shows_map:
            return chr(ord("a") + self.place), facts
        flat = "".join(self.rows)
        flat = flat[: self.place] + "P" + flat[self.place + 1 :]
        rows = [flat[row * self.size : (row + 1) * self.size] for row in range(self.size)]
        return ("\n".join(rows) if self.has_words else "/".join(rows) + "="), facts
