"""Checks the rollouts that rollout functions return."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from roll_batching.jobs.objectives.gigpo import Episode
from roll_batching.jobs.rewards.contract import Score, check_score, excerpt_of
from roll_batching.jobs.rollouts.contract import LoadedRolloutFunction, RolloutPrompt, RolloutSample
from roll_batching.jobs.rollouts.token_versions import TokenVersions
from roll_batching.registry import printable

_LARGEST_LOG_PROB = 1e-3
"""Log-probs of certain tokens may exceed 0 by rounding."""
_LEAST_LOG_PROB = -3e38
"""Lower ones are -inf in fp32, in which batches hold them."""
_LONGEST_STATE = 32
"""Longest key of a state that is passed between ranks unchanged; longer keys are replaced by digests."""
_LARGEST_DECIMAL = 1 << 64
"""Integer keys of states from this number on are written in hexadecimal."""
_FEWEST_REPEATED = 2
"""Tokens of a prompt that is recognised when a sample repeats it: one token may be a coincidence."""


class SampleFault(ValueError):
    """A fault of a returned sample: the field, what is wrong with it, and the cure."""


@dataclass(frozen=True, kw_only=True)
class CheckedSample:
    """A valid sample, in plain arrays."""

    prompt: np.ndarray
    """int64 `[m]`: tokens of the prompt."""
    tokens: np.ndarray
    """int64 `[n]`, after the prompt."""
    mask: np.ndarray
    """bool `[n]`: sampled by the policy."""
    log_probs: np.ndarray
    """float64 `[n]`, 0 outside the mask."""
    versions: np.ndarray | None
    """int64 `[n]`: versions of the weights, -1 outside the mask; None where all are the step's."""
    finished: bool


@dataclass(frozen=True, kw_only=True)
class CheckedRollout:
    """A valid rollout: its samples, and what counts once for all of them."""

    samples: tuple[CheckedSample, ...]
    """In the order of the function's; the last says whether the rollout has finished, and is what a reward reads."""
    score: Score | None
    """Rewards of the samples, added; a mark is set if a sample has it. None: the job's reward function scores."""
    episode: Episode | None
    """States and rewards of all turns, sample by sample, where the advantage estimator compares states."""
    calls: int
    """Generations of the model: calls of the client, or runs of the masks where a server made all of them."""


def check_rollout(
    result: Any,
    prompt: RolloutPrompt,
    function: LoadedRolloutFunction,
    *,
    vocab_size: int,
    stop_token_ids: Sequence[int],
    calls: int,
    versions: TokenVersions,
) -> CheckedRollout:
    """Checks `result`, which `function` returned for `prompt`; returns it as plain arrays. Raises SampleFault."""
    returned = list(result) if isinstance(result, (list, tuple)) else [result]
    if not returned:
        raise SampleFault("it returned no sample: return a RolloutSample, or a list of at least one")
    samples, scores, episodes = [], [], []
    for place, item in enumerate(returned):
        try:
            if not isinstance(item, RolloutSample):
                kind = printable(repr(item), characters=60) if item is None else f"a {type(item).__name__}"
                raise SampleFault(
                    f"it returned {kind}; return a roll_batching.jobs.rollouts.RolloutSample, or a list of them"
                )
            samples.append(_check_sample(item, prompt, function, vocab_size, stop_token_ids, versions))
            scores.append(_score(item, function))
            if function.needs_states:
                episodes.append(_episode(item, samples[-1].mask))
        except SampleFault as fault:
            if len(returned) == 1:
                raise
            raise SampleFault(f"samples[{place}]: {fault}") from None
    return CheckedRollout(
        samples=tuple(samples),
        score=None if function.has_reward else _sum_scores(scores),
        episode=_join_episodes(episodes) if function.needs_states else None,
        calls=calls or sum(_runs(sample.mask) for sample in samples),
    )


def _check_sample(
    result: RolloutSample,
    prompt: RolloutPrompt,
    function: LoadedRolloutFunction,
    vocab_size: int,
    stop_token_ids: Sequence[int],
    versions: TokenVersions,
) -> CheckedSample:
    tokens = _tokens("tokens", result.tokens, vocab_size)
    is_served = result.prompt_tokens is not None
    before = _tokens("prompt_tokens", result.prompt_tokens if is_served else prompt.tokens, vocab_size)
    mask = _mask(result.loss_mask, len(tokens))
    log_probs = _log_probs(result.log_probs, mask)
    size, limit = len(before) + len(tokens), function.sequence_length
    if size > limit:
        raise SampleFault(
            f"tokens has {len(tokens):,} after the prompt's {len(before):,}, and the job's sequence_length is "
            f"{limit:,}: end the rollout earlier (client.room tells how much fits), or raise sequence_length"
        )
    repeated = len(before)
    is_prompt = np.array_equal(tokens[:repeated], before) and not mask[:repeated].any()
    if repeated >= _FEWEST_REPEATED and is_prompt:
        raise SampleFault(
            "tokens begins with the prompt's tokens, which would be in the sample twice: return only what follows the "
            "prompt, such as context[len(prompt.tokens):]"
        )
    if function.needs_versions and not versions:
        raise SampleFault(
            "it was sampled without its client, so that the weights of its tokens are not known, which "
            "in_flight_updates needs: call client.generate, or set in_flight_updates to false"
        )
    finished = result.finished
    if finished is None:
        finished = int(tokens[-1]) in stop_token_ids
    elif not isinstance(finished, (bool, np.bool_)):
        raise SampleFault(f"finished is {excerpt_of(finished)}: set it to True, False or None")
    return CheckedSample(
        prompt=before,
        tokens=tokens,
        mask=mask,
        log_probs=log_probs,
        versions=versions.take(tokens, mask, log_probs) if function.needs_versions else None,
        finished=bool(finished),
    )


def _tokens(name: str, values: Any, vocab_size: int) -> np.ndarray:
    tokens = _as_list(name, values)
    if not tokens:
        needed = "one token that the policy sampled" if name == "tokens" else "one token of a prompt"
        raise SampleFault(f"{name} is empty: a sample needs at least {needed}")
    for place, token in enumerate(tokens):
        if isinstance(token, bool) or not isinstance(token, (int, np.integer)):
            raise SampleFault(f"{name}[{place}] is {excerpt_of(token)}: give token ids, such as tokenizer.encode(text)")
        if not 0 <= token < vocab_size:
            raise SampleFault(
                f"{name}[{place}] is {_number(token)}, and the vocabulary has the ids 0 to {vocab_size - 1}"
            )
    return np.array(tokens, dtype=np.int64)


def _mask(values: Any, count: int) -> np.ndarray:
    mask = _as_list("loss_mask", values)
    _same_length("loss_mask", mask, count)
    for place, value in enumerate(mask):
        if not isinstance(value, (bool, int, float, np.bool_, np.number)) or value not in (0, 1):
            raise SampleFault(f"loss_mask[{place}] is {excerpt_of(value)}: give 1 for sampled tokens and 0 for others")
    if not any(mask):
        raise SampleFault(
            "loss_mask counts no token: set it to 1 on the tokens that the policy sampled, or there is nothing to "
            "train on"
        )
    return np.array(mask, dtype=bool)


def _log_probs(values: Any, mask: np.ndarray) -> np.ndarray:
    if values is None:
        raise SampleFault("log_probs is missing: pass on those that the client returned with the tokens")
    log_probs = _as_list("log_probs", values)
    _same_length("log_probs", log_probs, len(mask))
    result = np.zeros(len(mask))
    for place, (value, counted) in enumerate(zip(log_probs, mask.tolist(), strict=True)):
        if value is None and not counted:
            continue
        if value is None:
            text = "and loss_mask counts that token: pass on the client's, or set loss_mask to 0 there"
            raise SampleFault(f"log_probs[{place}] is None, {text}")
        if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.integer, np.floating)):
            raise SampleFault(f"log_probs[{place}] is {excerpt_of(value)}: give numbers, as the client returned them")
        if not _LEAST_LOG_PROB < value < _LARGEST_LOG_PROB:  # NaN is not, either
            raise SampleFault(
                f"log_probs[{place}] is {_number(value)}, which is no logarithm of a probability: pass on those that "
                "the client returned, and None or 0 where loss_mask is 0"
            )
        result[place] = float(value) if counted else 0.0
    return result


def _score(result: RolloutSample, function: LoadedRolloutFunction) -> Score | None:
    reward = result.reward
    if function.has_reward:
        if reward is not None or result.marks:
            name = "marks" if reward is None else "reward"
            raise SampleFault(
                f"{name} is set, and the job has a reward function as well, which scores the sample: leave {name} out, "
                "or remove reward_function (or `rewards`) from the job"
            )
        return None
    if reward is None:
        if result.marks:
            raise SampleFault("marks is set, and reward is None: set a reward as well, such as 0")
        return None
    turns = [reward] if not _is_sequence(reward) else _as_list("reward", reward)
    if not turns:
        raise SampleFault("reward is empty: give a number, or one per turn")
    total = 0.0
    for place, value in enumerate(turns):
        name = "reward" if turns is not reward and len(turns) == 1 else f"reward[{place}]"
        try:
            total += check_score(Score(reward=value)).reward
        except (TypeError, ValueError) as error:
            raise SampleFault(f"{name}: {error}: give a finite number") from None
    try:
        return check_score(Score(reward=total, marks=result.marks))
    except (TypeError, ValueError) as error:
        raise SampleFault(f"marks: {error}") from None


def _sum_scores(scores: Sequence[Score | None]) -> Score:
    """The rollout's score: rewards of its samples added, and the marks of any of them."""
    known = [score for score in scores if score is not None]
    if not known:
        whose = "reward" if len(scores) == 1 else f"the reward of each of its {len(scores)} samples"
        raise SampleFault(
            f"{whose} is None, and the job has no reward function: set it, or give the job reward_function"
        )
    names = {name for score in known for name in score.marks}
    total = 0.0
    for score in known:  # as rewards of turns are added: Python 3.12's `sum` rounds otherwise
        total += score.reward
    return Score(
        reward=total,
        marks={name: any(score.marks.get(name, False) for score in known) for name in names},
    )


def _episode(result: RolloutSample, mask: np.ndarray) -> Episode:
    """Checks states and rewards of a sample's turns, one per turn; long keys of states become digests."""
    why = "adv_estimator: gigpo compares turns in equal states"
    turns = _runs(mask)
    if result.states is None:
        raise SampleFault(f"states is None, and {why}: give the key of the state before each of the {turns} turns")
    states, rewards = _of_turns("states", result.states, turns, why), _of_turns("reward", result.reward, turns, why)
    for place, state in enumerate(states):
        if isinstance(state, (bool, np.bool_)) or not isinstance(state, (str, int, np.integer)):
            raise SampleFault(f"states[{place}] is {excerpt_of(state)}: give a text or an integer")
    return Episode(
        states=tuple(_state_key(state) for state in states), rewards=tuple(float(value) for value in rewards)
    )


def _join_episodes(episodes: Sequence[Episode]) -> Episode:
    """The turns of all samples as those of one rollout."""
    return Episode(
        states=tuple(state for episode in episodes for state in episode.states),
        rewards=tuple(reward for episode in episodes for reward in episode.rewards),
    )


def _runs(mask: np.ndarray) -> int:
    """Number of runs of True in `mask`."""
    return int(mask[0]) + int((mask[1:] & ~mask[:-1]).sum())


def _of_turns(name: str, value: Any, turns: int, why: str) -> list[Any]:
    """Returns the `value` of the field `name` as a list with one item per turn. Raises SampleFault."""
    if not _is_sequence(value):
        raise SampleFault(f"{name} is {excerpt_of(value)}, and {why}: give a list with one value per turn")
    values = _as_list(name, value)
    if len(values) != turns:
        raise SampleFault(
            f"{name} has {len(values)} values, and loss_mask has {turns} turns, runs of 1: give one value per turn, "
            "and put at least one token of the environment between two turns"
        )
    return values


def _state_key(state: Any) -> str:
    """A short text for a state's key; keys of a text and of an integer are never equal."""
    if isinstance(state, str):
        text = repr(state)  # with quotes, which an integer has not
    else:  # Python refuses to write integers of more than 4,300 digits in decimal
        text = str(int(state)) if abs(int(state)) < _LARGEST_DECIMAL else f"{int(state):#x}"
    return text if len(text) <= _LONGEST_STATE else hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _is_sequence(value: Any) -> bool:
    return isinstance(value, (list, tuple)) or bool(getattr(value, "ndim", 0))


def _as_list(name: str, values: Any) -> list[Any]:
    """A list, tuple, or one-dimensional array or tensor as a list."""
    if isinstance(values, (list, tuple)):
        return list(values)
    if getattr(values, "ndim", None) == 1 and hasattr(values, "tolist"):
        return list(values.tolist())
    shape = f" of shape {tuple(values.shape)}" if hasattr(values, "shape") else ""
    raise SampleFault(f"{name} is {excerpt_of(values)}{shape}: give a list, or an array of one dimension")


def _same_length(name: str, values: Sequence[Any], count: int) -> None:
    if len(values) != count:
        raise SampleFault(f"{name} has {len(values):,} values for {count:,} tokens: give one for each token")


def _number(value: Any) -> str:
    """A number in at most 60 characters."""
    try:
        return printable(str(value), characters=60)
    except ValueError:  # an integer of more than 4,300 digits
        return f"a number of {int(value).bit_length():,} bits"
