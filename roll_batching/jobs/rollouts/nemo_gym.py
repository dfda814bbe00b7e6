"""Rollout function of NeMo-Gym: a running agent makes the sample, with the tokens that the engine sampled.

    rollout_function: roll_batching.jobs.rollouts.nemo_gym:rollout
    rollout_args: {url: http://gym:11000}    # Gym's head server

Protocol (NeMo-Gym, `nemo_gym/server_utils.py` and `rollout_collection.py`, August 2026): the head server's
`/global_config_dict_yaml` names the address of each agent. A line of data is the body of the agent's `/run`; its reply
has the `reward` and the items of `response.output`. The last item of each model call has `prompt_token_ids` (all that
the model read), `generation_token_ids` and `generation_log_probs`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import yaml

from roll_batching.errors import EngineError
from roll_batching.jobs.processes.requests import (
    Call,
    ReplyTooLarge,
    RequestFailed,
    excerpt,
    get,
    open_session,
    post,
    retry_pause,
)
from roll_batching.jobs.rollouts.contract import RolloutClient, RolloutPrompt, RolloutSample
from roll_batching.jobs.rollouts.sample_checks import SampleFault
from roll_batching.jobs.texts.tokenizers import Tokenizer
from roll_batching.strategy.sampling import GenerationSettings

_PARAMETERS = "responses_create_params"
_IDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
_ATTEMPTS = 3
_PAUSE_SECONDS = 0.5
_LONGEST_SECONDS = 7 * 86400.0
"""Limit of a rollout; rollout_function_timeout ends it earlier."""
_CONFIGURATION_SECONDS = 60.0
"""Limit of a request for the configuration."""
_MORE_BYTES = 96 << 20
"""Bytes of a rollout's reply beyond the usual limit: each turn repeats its context, about 1 MB for 128k tokens."""
_TRAINING_SERVER = "start Gym with responses_api_models/vllm_model/configs/vllm_model_for_training.yaml"

_servers: dict[asyncio.AbstractEventLoop, dict[str, asyncio.Task[Any]]] = {}
"""By event loop, which lives for a step, and head server's URL: the request for Gym's configuration."""


async def rollout(
    prompt: RolloutPrompt, client: RolloutClient, tokenizer: Tokenizer, url: str, agent: str | None = None
) -> RolloutSample:
    """Has an agent of the NeMo-Gym at `url` make the sample of the prompt's line.

    `agent` names the agent for lines without `agent_ref`. Temperature, `top_p` and the limit of tokens are the job's;
    a line's `max_output_tokens` counts if it is smaller. Raises SampleFault, with what to change.
    """
    line = request_of(prompt, client.settings, agent)
    name = line["agent_ref"]["name"]
    base = str(url).rstrip("/")
    if not _is_address(base):
        raise SampleFault(
            f"rollout_args.url is {excerpt(url)!r}: write the address of Gym's head server, http://host:port"
        )
    address = _address(await _configuration(base), name, base)
    where = f"NeMo-Gym's agent {name} at {address}"
    cure = "see Gym's log; on another machine Gym must be started with default_host set to its address"
    result = await _ask(address, Call("/run", line, extra_bytes=_MORE_BYTES), where, cure, _LONGEST_SECONDS)
    return sample_of(result, where)


def request_of(prompt: RolloutPrompt, settings: GenerationSettings, agent: str | None = None) -> dict[str, Any]:
    """Makes the body of `/run` for the prompt's line. Raises SampleFault for a line that Gym cannot use."""
    line = prompt.record
    parameters = line.get(_PARAMETERS)
    if parameters is None and isinstance(messages := _list(line.get("messages")), list):
        parameters = {"input": messages}
    if not isinstance(parameters, Mapping) or not parameters.get("input"):
        raise SampleFault(
            f"its line has no {_PARAMETERS} with an input, and no messages: NeMo-Gym's lines have one or the other"
        )
    reference = line.get("agent_ref") or {"name": agent}
    if not isinstance(reference, Mapping) or not isinstance(reference.get("name"), str):
        raise SampleFault(
            "its line has no agent_ref with a name: prepare the data with Gym, or name the agent in rollout_args.agent"
        )
    if settings.top_k and not settings.greedy:
        raise SampleFault(
            f"top_k is {settings.top_k}, which requests of the Responses API do not have: set "
            "actor_infer.generating_args.top_k to 0"
        )
    limit = parameters.get("max_output_tokens")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise SampleFault(
            f"its line has the max_output_tokens {excerpt(repr(limit), 60)}: write a positive integer, or leave it out"
        )
    sampling = {
        "temperature": 0.0 if settings.greedy else settings.temperature,
        "top_p": 1.0 if settings.greedy else settings.top_p,
        "max_output_tokens": settings.max_new_tokens if limit is None else min(limit, settings.max_new_tokens),
    }
    return {**line, "agent_ref": dict(reference), _PARAMETERS: {**parameters, **sampling}}


def _list(value: Any) -> Any:
    """Parses a JSON text; other values, and texts that are no JSON, are returned unchanged."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def sample_of(result: Any, where: str) -> RolloutSample:
    """Makes the sample of an agent's reply: sampled tokens with log-probs, and between turns masked tokens.

    Turn k + 1 must read all tokens of turn k: then the whole rollout is one sequence, and each of its tokens was
    sampled after those before it. Raises SampleFault for other replies.
    """
    response = result.get("response") if isinstance(result, Mapping) else None
    output = response.get("output") if isinstance(response, Mapping) else None
    if not isinstance(response, Mapping) or not isinstance(output, list):
        raise SampleFault(f"the reply of {where} has no response with an output: {excerpt(result)}")
    turns = [
        _turn(item, number, where)
        for number, item in enumerate(output)
        if isinstance(item, Mapping) and item.get("generation_token_ids")  # ends a model call that sampled tokens
    ]
    if not turns:
        raise SampleFault(_without_turns(output, where))
    prompt, tokens, mask, log_probs = turns[0][0], list[int](), list[int](), list[float]()
    context = prompt
    for number, (before, sampled, values) in enumerate(turns, 1):
        _check_history(context, before, number, where)
        added = before[len(context) :]  # of tools and environments, since the last turn
        tokens += [*added, *sampled]
        mask += [0] * len(added) + [1] * len(sampled)
        log_probs += [0.0] * len(added) + values
        context = [*before, *sampled]
    return RolloutSample(
        prompt_tokens=prompt,
        tokens=tokens,
        loss_mask=mask,
        log_probs=log_probs,
        reward=_reward(result, where),
        finished=False if response.get("incomplete_details") else None,
        marks={"flagged": bool(result.get("mask_sample"))},
    )


def _turn(item: Mapping[str, Any], number: int, where: str) -> tuple[list[int], list[int], list[float]]:
    lists: list[Any] = [item.get(name) for name in _IDS]
    for name, values_of_item in zip(_IDS, lists, strict=True):
        if not isinstance(values_of_item, list) or not values_of_item:
            raise SampleFault(f"output item {number} of {where} has no {name}: {_TRAINING_SERVER}")
    before, sampled, values = lists
    if len(values) != len(sampled):
        raise SampleFault(
            f"output item {number} of {where} has {len(sampled):,} generation_token_ids and {len(values):,} "
            f"generation_log_probs: each token needs one; {_TRAINING_SERVER}"
        )
    return before, sampled, values


def _without_turns(output: Sequence[Any], where: str) -> str:
    kinds = [item.get("type") if isinstance(item, Mapping) else type(item).__name__ for item in output]
    return (
        f"no output item of {where} has generation_token_ids (items: {excerpt(kinds)}): either the model server does "
        f"not return them ({_TRAINING_SERVER}), or nothing was sampled because the prompt does not fit into the "
        "engine's context (leave the line out, or raise sequence_length and the engine's --max-model-len)"
    )


def _check_history(context: Sequence[int], before: Sequence[int], number: int, where: str) -> None:
    """Raises SampleFault unless `before`, read by turn `number`, begins with `context`."""
    if before[: len(context)] == context:
        return
    pairs = enumerate(zip(context, before, strict=False))
    place = next((place for place, (ours, theirs) in pairs if ours != theirs), min(len(context), len(before)))
    raise SampleFault(
        f"the prompt of turn {number} of {where} does not begin with the tokens of turn {number - 1}; the first "
        f"difference is at token {place:,}. The agent or the chat template rewrites the history (such as dropping "
        "reasoning), or text is tokenized to other tokens than those sampled: use a template that keeps the history, "
        "a server that continues from the tokens of earlier turns, or an agent of one turn"
    )


def _reward(result: Mapping[str, Any], where: str) -> float:
    reward: Any = result.get("reward")
    is_number = isinstance(reward, (int, float)) and not isinstance(reward, bool)
    if not is_number or not abs(reward) <= sys.float_info.max:  # NaN is not; an integer may be larger than any float
        raise SampleFault(
            f"the reward of {where} is {excerpt(repr(reward), 60)}: its verifier must return a finite number"
        )
    return float(reward)


async def _configuration(url: str) -> Any:
    """Returns Gym's configuration from its head server, which is asked once per event loop."""
    loop = asyncio.get_running_loop()
    for closed_loop in [other for other in _servers if other.is_closed()]:
        del _servers[closed_loop]  # a task refers to its loop, so a weak key would keep both
    tasks = _servers.setdefault(loop, {})
    if url not in tasks:
        tasks[url] = loop.create_task(_read_configuration(url))
    return await asyncio.shield(tasks[url])


async def _read_configuration(url: str) -> Any:
    where, cure = f"NeMo-Gym's head server at {url}", "start Gym before the job, or correct rollout_args.url"
    text = await _ask(url, "/global_config_dict_yaml", where, cure, _CONFIGURATION_SECONDS)
    try:
        return yaml.safe_load(text) if isinstance(text, str) else text
    except (yaml.YAMLError, ValueError, RecursionError):  # the latter two of dates, integers and depth
        raise SampleFault(f"the configuration of {where} is not YAML: {excerpt(text)}; {cure}") from None


def _address(configuration: Any, agent: str, url: str) -> str:
    """URL of `agent` by Gym's configuration: server > type > name > host and port."""
    servers = configuration if isinstance(configuration, dict) else {}
    settings: Any = servers.get(agent)
    for _ in range(2):  # the type, then the name, each of which has one entry
        settings = next(iter(settings.values()), None) if isinstance(settings, dict) else None
    if not isinstance(settings, dict) or not settings.get("host") or not settings.get("port"):
        known = sorted(
            str(name)
            for name, server in servers.items()
            if isinstance(server, dict) and "responses_api_agents" in server
        )
        raise SampleFault(
            f"NeMo-Gym at {url} runs no agent {agent!r}, but {', '.join(known) or 'none'}: start Gym with its "
            "configuration, or correct agent_ref of the lines (rollout_args.agent for lines without)"
        )
    return f"http://{settings['host']}:{settings['port']}"


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and url.isprintable()
    except ValueError:  # such as half an IPv6 address
        return False


async def _ask(url: str, call: Call | str, where: str, cure: str, seconds: float) -> Any:
    """Sends a request of at most `seconds`, again if the server fails; returns the reply. Raises SampleFault."""
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            async with open_session(seconds) as session:
                return await (get(session, url, call) if isinstance(call, str) else post(session, url, call))
        except ReplyTooLarge as error:  # another rollout would not be shorter
            raise SampleFault(
                f"{where}: {error}; limit the agent's turns, or what it returns beside the tokens"
            ) from None
        except RequestFailed as error:
            if attempt == _ATTEMPTS:
                raise SampleFault(f"{where} did not answer in {_ATTEMPTS} attempts: {error}; {cure}") from None
            await asyncio.sleep(retry_pause(attempt, _PAUSE_SECONDS))
        except EngineError as error:
            raise SampleFault(f"{where}: {error}; {cure}") from None
    raise AssertionError("the last attempt returns or raises")
