"""Rollout function of NeMo-Gym: a running agent makes the sample, with the tokens that the engine sampled.

    rollout_function: roll_batching.jobs.rollouts.nemo_gym:rollout
    rollout_args: {url: http://gym:11000}    # Gym's head server

Protocol (NeMo-Gym 0.7.0, `nemo_gym/server_utils.py` and `rollout_collection.py`): the head server's
`/global_config_dict_yaml` names the address of each agent. A line of data is the body of the agent's `/run`; its reply
has the `reward` and the items of `response.output`. The last item of each model call has `prompt_token_ids` (all that
the model read), `generation_token_ids` and `generation_log_probs`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
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
_AGENTS = "responses_api_agents"
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

_WATCH_SECONDS = 5.0
_REFUSALS = 3
"""Refused connections in a row after which an engine counts as ended: Gym's model server would retry without end."""

_shared_tasks: dict[asyncio.AbstractEventLoop, dict[str, asyncio.Task[Any]]] = {}
"""By event loop, which lives for a step: the request for Gym's configuration, and the watch on its engines."""


async def rollout(
    prompt: RolloutPrompt, client: RolloutClient, tokenizer: Tokenizer, url: str, agent: str | None = None
) -> RolloutSample:
    """Has an agent of the NeMo-Gym at `url` make the sample of the prompt's line.

    `agent` names the agent for lines without `agent_ref`; without both, the line's `task_source` does. Temperature,
    `top_p` and the limit of tokens are the job's; a line's `max_output_tokens` counts if it is smaller. Raises
    SampleFault, with what to change.
    """
    line = request_of(prompt, client.settings)
    base = str(url).rstrip("/")
    if not _is_address(base):
        raise SampleFault(
            f"rollout_args.url is {excerpt(url)!r}: write the address of Gym's head server, http://host:port"
        )
    servers = await asyncio.shield(_share(base, lambda: _read_configuration(base)))
    name = agent_of(prompt.record, agent, servers, base)
    address = _address(servers, name, base)
    where = f"NeMo-Gym's agent {name} at {address}"
    cure = "see Gym's log; on another machine Gym must be started with default_host set to its address"
    call = Call("/run", {**line, "agent_ref": {**line["agent_ref"], "name": name}}, extra_bytes=_MORE_BYTES)
    reply = asyncio.create_task(_ask(address, call, where, cure, _LONGEST_SECONDS))
    ended_engine = _share(f"engines of {base}", lambda: _ended_engine(_engines(servers)))
    await asyncio.wait({reply, ended_engine}, return_when=asyncio.FIRST_COMPLETED)
    if not reply.done():
        reply.cancel()
        raise SampleFault(
            f"{where} waits for the engine at {ended_engine.result()}, which has ended: see the engine's log, and "
            "start the engine and the job again"
        )
    return sample_of(reply.result(), where)


def request_of(prompt: RolloutPrompt, settings: GenerationSettings) -> dict[str, Any]:
    """Makes the body of `/run` for the prompt's line. Raises SampleFault for a line that Gym cannot use."""
    line = prompt.record
    parameters = line.get(_PARAMETERS)
    if parameters is None and isinstance(messages := _list(line.get("messages")), list):
        parameters = {"input": messages}
    if not isinstance(parameters, Mapping) or not parameters.get("input"):
        raise SampleFault(
            f"its line has no {_PARAMETERS} with an input, and no messages: NeMo-Gym's lines have one or the other"
        )
    reference = line.get("agent_ref") or {}
    if not isinstance(reference, Mapping) or not isinstance(reference.get("name", ""), str):
        raise SampleFault(f"its line has the agent_ref {excerpt(repr(reference), 60)}: write {{name: AGENT}}")
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


def _share(key: str, make: Callable[[], Coroutine[Any, Any, Any]]) -> asyncio.Task[Any]:
    """Task of the event loop under `key`, which all its rollouts share."""
    loop = asyncio.get_running_loop()
    for closed_loop in [other for other in _shared_tasks if other.is_closed()]:
        del _shared_tasks[closed_loop]  # a task refers to its loop, so a weak key would keep both
    tasks = _shared_tasks.setdefault(loop, {})
    if key not in tasks:
        tasks[key] = loop.create_task(make())
    return tasks[key]


async def _read_configuration(url: str) -> dict[str, Any]:
    """Returns Gym's configuration, server > type > name > settings, from its head server."""
    where, cure = f"NeMo-Gym's head server at {url}", "start Gym before the job, or correct rollout_args.url"
    text = await _ask(url, "/global_config_dict_yaml", where, cure, _CONFIGURATION_SECONDS)
    try:
        servers = yaml.safe_load(text) if isinstance(text, str) else text
    except (yaml.YAMLError, ValueError, RecursionError):  # the latter two of dates, integers and depth
        raise SampleFault(f"the configuration of {where} is not YAML: {excerpt(text)}; {cure}") from None
    return servers if isinstance(servers, dict) else {}


def _settings(servers: Mapping[str, Any], name: Any, kind: str) -> dict[str, Any]:
    """Settings of the server `name` of type `kind`; empty without such a server."""
    server = servers.get(name) if isinstance(name, str) else None
    named = server.get(kind) if isinstance(server, dict) else None
    settings = next(iter(named.values()), None) if isinstance(named, dict) else None
    return settings if isinstance(settings, dict) else {}


def agent_of(line: Mapping[str, Any], agent: str | None, servers: Mapping[str, Any], url: str) -> str:
    """Name of the line's agent: of `agent_ref`, `agent`, or the agent of `task_source`. Raises SampleFault.

    `task_source` names the server that declares the line's data set: an agent, or a resources server with one agent.
    """
    source = line.get("task_source")
    if name := (line.get("agent_ref") or {}).get("name") or agent:
        return str(name)
    if source is None:
        raise SampleFault(
            "its line has no agent_ref with a name and no task_source: prepare the data with Gym, or name the agent "
            "in rollout_args.agent"
        )
    if _settings(servers, source, _AGENTS):
        return str(source)
    agents = sorted(
        name
        for name in servers
        if (reference := _settings(servers, name, _AGENTS).get("resources_server")) and reference.get("name") == source
    )
    pins = {data_set.get("agent") for data_set in _settings(servers, source, "resources_servers").get("datasets") or ()}
    agents = [name for name in agents if name in pins] or agents
    if len(agents) != 1:
        raise SampleFault(
            f"its line has the task_source {excerpt(repr(source), 60)}, for which NeMo-Gym at {url} has {len(agents)} "
            f"agents ({', '.join(agents) or 'none'}): name one in rollout_args.agent, or correct task_source"
        )
    return agents[0]


def _address(servers: Mapping[str, Any], agent: str, url: str) -> str:
    """URL of `agent` by Gym's configuration."""
    settings = _settings(servers, agent, _AGENTS)
    if not settings.get("host") or not settings.get("port"):
        known = sorted(name for name in servers if _settings(servers, name, _AGENTS))
        raise SampleFault(
            f"NeMo-Gym at {url} runs no agent {agent!r}, but {', '.join(known) or 'none'}: start Gym with its "
            "configuration, or correct agent_ref of the lines (rollout_args.agent for lines without)"
        )
    return f"http://{settings['host']}:{settings['port']}"


def _engines(servers: Mapping[str, Any]) -> list[str]:
    """Addresses of the engines that Gym's model servers call; `${key}` refers to a key of the configuration."""
    addresses = list[str]()
    for name in servers:
        url = _settings(servers, name, "responses_api_models").get("base_url")
        if isinstance(url, str) and url.startswith("${"):
            url = servers.get(url[2:-1])
        addresses += [url] if isinstance(url, str) else url or ()
    return [address for address in addresses if _is_address(address)]


async def _ended_engine(addresses: Sequence[str]) -> str:
    """Returns the first address that accepted a connection before and now refuses several in a row.

    One that never accepts may be reachable from Gym's machine alone.
    """
    refusals = dict[str, int]()
    while True:
        for address in addresses:
            if await _accepts(address):
                refusals[address] = 0
            elif address in refusals:
                refusals[address] += 1
                if refusals[address] >= _REFUSALS:
                    return address
        await asyncio.sleep(_WATCH_SECONDS)


async def _accepts(address: str) -> bool:
    parts = urlsplit(address)
    port = parts.port or {"http": 80, "https": 443}[parts.scheme]
    try:
        _, writer = await asyncio.open_connection(parts.hostname, port)
    except (OSError, UnicodeError):  # the latter of names that no host can have
        return False
    writer.close()
    return True


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        is_complete = bool(parts.hostname) and parts.port != 0
        return parts.scheme in ("http", "https") and is_complete and url.isprintable()
    except ValueError:  # such as half an IPv6 address, or a port that is no number
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
