"""NeMo-Gym's rollout function against a server in its format: exact tokens of turns, and every fault by name."""

from __future__ import annotations

import json
import math
import socket
import threading
from typing import Any

import pytest
import yaml

pytest.importorskip("aiohttp")
from aiohttp import web

from roll_batching.errors import DataError
from roll_batching.jobs.config import ConfigFileError, load_config
from roll_batching.jobs.config.rollout_keys import NEMO_GYM
from roll_batching.jobs.processes import requests
from roll_batching.jobs.rollouts import nemo_gym
from roll_batching.jobs.rollouts.contract import LoadedRolloutFunction, RolloutPrompt, load_rollout_function
from roll_batching.jobs.rollouts.function_calls import FunctionCalls
from roll_batching.jobs.rollouts.function_rollouts import _batch
from roll_batching.jobs.texts import CharTokenizer
from roll_batching.jobs.texts.faults import Faults
from roll_batching.jobs.texts.records import iterate_records
from roll_batching.strategy import GenerationSettings
from tests.campaigns.peer_configs import jobs
from tests.jobs.rollouts.gym_server import GymServer, item, reply
from tests.support.tiny_job import VOCABULARY
from tests.tools.conversion.test_nemo_rl_defaults import converted, file_of

TOKENIZER = CharTokenizer(VOCABULARY, eos="$", pad=".")
END = TOKENIZER.eos_token_id
LINE = {
    "responses_create_params": {"input": [{"role": "user", "content": "1+2="}], "max_output_tokens": 5},
    "agent_ref": {"type": "responses_api_agents", "name": "simple"},
    "expected_answer": "3",
}
TWO_TURNS = reply(
    {"type": "reasoning", "summary": []},
    item([3, 4, 5], [6, END], "function_call"),
    {"type": "function_call_output", "call_id": "1", "output": "3"},
    item([3, 4, 5, 6, END, 7, 8], [9, 10, END], first=-1.0),
    reward=0.75,
)


def roll_out(
    url: str,
    line: Any,
    *,
    count: int = 2,
    agent: str | None = None,
    tokenizer: Any = TOKENIZER,
    sequence_length: int = 12,
    **settings: Any,
) -> list[Any]:
    """The checked rollouts of `count` calls with `line`, by the Gym at `url`."""
    sampling = GenerationSettings(**{"max_new_tokens": 8, "eos_token_id": END, "vocab_size": 43, **settings})
    prompts = [
        RolloutPrompt(tokens=tokenizer.encode("1+2="), text="1+2=", record=line, sample=i, seed=i) for i in range(count)
    ]
    arguments = {"url": url, "agent": agent}
    function = LoadedRolloutFunction(
        path=NEMO_GYM,
        function=load_rollout_function(NEMO_GYM, arguments),
        arguments=arguments,
        timeout=60,
        max_calls=9,
        sequence_length=sequence_length,
        has_reward=False,
    )
    with FunctionCalls(function, prompts, tokenizer, sampling) as calls:
        assert not calls.take(), "Gym's agents call the engine, and not the client"
        return calls.collect(range(count))


def samples(answer: Any, line: Any = LINE, *, url: str | None = None, servers: Any = None, **arguments: Any) -> Any:
    """The checked rollouts of `roll_out` by a stand-in, and that server."""
    with GymServer(answer if callable(answer) else lambda body: answer, servers) as server:
        return roll_out(url or server.url, line, **arguments), server


def test_samples_are_the_tokens_that_the_server_sampled():
    """Two turns with a tool: ids, mask, log-probs, reward and the engine's prompt, in every sample."""
    made, server = samples(TWO_TURNS)
    assert server.configurations == 1 and len(server.requests) == len(made) == 2
    for rollout in made:
        (sample,) = rollout.samples
        assert sample.prompt.tolist() == [3, 4, 5], "as the engine's chat template made it, not as the job's"
        assert sample.tokens.tolist() == [6, END, 7, 8, 9, 10, END]
        assert sample.mask.tolist() == [True, True, False, False, True, True, True]
        assert sample.log_probs.tolist() == [-0.5, -0.75, 0, 0, -1.0, -1.25, -1.5]
        assert (rollout.score.reward, sample.finished, rollout.calls) == (0.75, True, 2)
    batch = _batch([rollout.samples[0] for rollout in made])
    assert batch.lengths.tolist() == [10, 10]
    assert batch.to_lists("input_ids")[1].tolist() == [3, 4, 5, 6, END, 7, 8, 9, 10, END]
    assert batch.to_lists("response_mask")[1].tolist() == [False] * 3 + sample.mask.tolist()
    # Row i belongs to token i + 1.
    assert batch.to_lists("log_probs")[1].tolist() == [0, 0, *sample.log_probs.tolist(), 0]


def test_the_request_is_the_line_with_the_jobs_sampling():
    _, server = samples(TWO_TURNS, count=1, temperature=0.5, top_p=0.9)
    sent = {**LINE["responses_create_params"], "temperature": 0.5, "top_p": 0.9}
    assert server.requests == [{**LINE, "responses_create_params": sent}]
    _, server = samples(TWO_TURNS, count=1, greedy=True, max_new_tokens=3)
    parameters = server.requests[0]["responses_create_params"]
    assert (parameters["temperature"], parameters["max_output_tokens"]) == (0.0, 3)


def test_an_error_that_servers_quote_one_from_the_other_stays_readable():
    """Each of Gym's servers quotes the error of the server that it called, and with it the backslashes."""
    text = "--enable-auto-tool-choice"
    for _ in range(7):
        text = json.dumps(f'an inner server: b"{text}"')
    shown = requests.excerpt(text, 500)
    assert len(text) > 700 and "--enable-auto-tool-choice" in shown and "\\\\" not in shown


def test_a_line_that_has_only_messages():
    line = {"messages": [{"role": "user", "content": "1+2="}], "agent_ref": {"name": "simple"}}
    _, server = samples(TWO_TURNS, line, count=1)
    assert server.requests[0]["responses_create_params"]["input"] == line["messages"]


def agent_of_source(source: str) -> dict[str, Any]:
    return {"responses_api_agents": {"simple_agent": {"resources_server": {"name": source}}}}


SOURCES: dict[str, tuple[str, dict[str, Any]]] = {
    "its only agent": ("sums", {}),
    "the agent itself": ("simple", {"other": agent_of_source("sums")}),
    "the pinned agent": (
        "sums",
        {
            "other": agent_of_source("sums"),
            "sums": {"resources_servers": {"equivalence_rule": {"datasets": [{"name": "a"}, {"agent": "simple"}]}}},
        },
    ),
}


@pytest.mark.parametrize("case", SOURCES)
def test_the_agent_of_a_task_source(case):
    """Lines that Gym 0.7 prepares name the server that declares their data set, and no agent."""
    source, servers = SOURCES[case]
    line = {name: value for name, value in LINE.items() if name != "agent_ref"} | {"task_source": source}
    _, server = samples(TWO_TURNS, line, count=1, servers=servers)
    assert server.requests[0]["agent_ref"] == {"name": "simple"}
    _, server = samples(TWO_TURNS, {**line, "task_source": "other"}, count=1, agent="simple")
    assert server.requests[0]["agent_ref"] == {"name": "simple"}


def test_an_engine_that_ends_is_named(monkeypatch):
    """One that has never accepted a connection may be reachable from Gym's machine alone, and is not counted."""
    monkeypatch.setattr(nemo_gym, "_WATCH_SECONDS", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as engine:
        urls = [f"http://127.0.0.1:{port}/v1" for port in (9, engine.getsockname()[1], "${port}")]
        threading.Timer(1.0, engine.close).start()
        with pytest.raises(DataError, match=f"agent simple at .* waits for the engine at {urls[1]}, which has ended"):
            samples(None, servers={"policy_base_url": urls})


def test_an_incomplete_response_and_a_flag():
    answer = reply(item([3], [4, 5]), mask_sample=True)
    answer["response"]["incomplete_details"] = {"reason": "max_output_tokens"}
    (rollout,), _ = samples(answer, count=1)
    assert not rollout.samples[0].finished and rollout.score.marks == {"flagged": True}


BROKEN: dict[str, tuple[Any, str]] = {
    "missing ids": (reply({"type": "message", "role": "assistant"}), "vllm_model_for_training.yaml.*sequence_length"),
    "no turn": (reply(), "no output item .* has generation_token_ids"),
    "no prompt ids": (reply({**item([3], [4]), "prompt_token_ids": None}), "has no prompt_token_ids"),
    "no log-probs": (reply({**item([3], [4]), "generation_log_probs": []}), "has no generation_log_probs"),
    "fewer log-probs": (reply({**item([3], [4, 5]), "generation_log_probs": [-1.0]}), "2 generation_token_ids and 1 "),
    "NaN log-prob": (reply({**item([3], [4]), "generation_log_probs": [math.nan]}), r"log_probs\[0\] is nan"),
    "text ids": (reply(item([3], ["token_id:4"])), r"tokens\[0\] is a str"),  # type: ignore[list-item]
    "an id too large": (reply(item([43], [4])), r"prompt_tokens\[0\] is 43"),
    "rewritten history": (
        reply(item([3, 4], [5, 6]), item([3, 4, 5, 7, 8], [9])),
        "turn 2 .* does not begin with the tokens of turn 1; the first difference is at token 3",
    ),
    "shortened history": (reply(item([3, 4], [5, 6]), item([3, 4], [9])), "first difference is at token 2"),
    "too many tokens": (reply(item([3] * 6, [4] * 7)), "tokens has 7 after the prompt's 6, .*sequence_length is 12"),
    "NaN reward": (reply(item([3], [4]), reward=math.nan), "reward of .* is nan: .*finite number"),
    "a huge reward": (reply(item([3], [4]), reward=10**400), "reward of .* is 10+: .*finite number"),
    "a reply too large": (
        reply(item([3], [4]), text="x" * 3000),
        "/run: its reply has more than 0 MiB; limit the agent's turns",
    ),
    "no reward": (reply(item([3], [4]), reward=None), "reward of .* finite number"),
    "no response": ({"error": "x"}, "has no response with an output"),
    "refused": (422, "status 422: .the agent failed.; see Gym's log"),
    "failed": (500, "did not answer in 3 attempts: /run: status 500: .the agent failed"),
}


@pytest.mark.bad_input
@pytest.mark.parametrize("case", BROKEN)
def test_a_reply_that_cannot_be_trained_on(case, monkeypatch):
    monkeypatch.setattr(nemo_gym, "_PAUSE_SECONDS", 0.01)
    if case == "a reply too large":
        monkeypatch.setattr(requests, "_LARGEST_REPLY", 2000)
        monkeypatch.setattr(nemo_gym, "_MORE_BYTES", 0)
    answer, words = BROKEN[case]
    with pytest.raises(DataError, match=f"(?s)nemo_gym:rollout failed on rollout 0 .*{words}"):
        samples(answer, count=1)


def test_a_reply_may_be_larger_than_an_engines(monkeypatch):
    """Each turn of an agent repeats its whole context."""
    monkeypatch.setattr(requests, "_LARGEST_REPLY", 2000)
    samples(reply(item([3], [4]), text="x" * 3000), count=1)


def test_steps_leave_no_event_loop_behind():
    for _ in range(3):
        samples(TWO_TURNS, count=1)
    assert len(nemo_gym._shared_tasks) <= 1


LINES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no input": ({"agent_ref": {"name": "simple"}}, {}, "no responses_create_params with an input"),
    "no agent": ({"messages": [{}]}, {}, "no agent_ref with a name"),
    "an agent_ref that is a text": ({**LINE, "agent_ref": "simple"}, {}, "has the agent_ref 'simple': write"),
    "an unknown task_source": (
        {"messages": [{}], "task_source": "products"},
        {},
        "task_source 'products', for which .* has 0 agents .none.: name one in rollout_args.agent",
    ),
    "a task_source of two agents": (
        {"messages": [{}], "task_source": "sums"},
        {"servers": {"other": agent_of_source("sums")}},
        "has 2 agents .other, simple.",
    ),
    "another agent": ({**LINE, "agent_ref": {"name": "other"}}, {}, "runs no agent 'other', but simple"),
    "top_k": (LINE, {"top_k": 5}, "top_k is 5.* set actor_infer.generating_args.top_k to 0"),
    "nothing there": (LINE, {"url": "http://127.0.0.1:9"}, "head server at http://127.0.0.1:9 did not answer"),
    "half an address": (LINE, {"url": "http://[::1"}, r"rollout_args.url is 'http://\[::1'"),
    "no port": (LINE, {"url": "http://gym:port"}, "rollout_args.url is 'http://gym:port'"),
    "no host": (LINE, {"url": "http://:80"}, "rollout_args.url is 'http://:80'"),
    "an unprintable host": (LINE, {"url": "http://a\x00b"}, "rollout_args.url is 'http://a b'"),
    **{
        f"max_output_tokens {value!r}": (
            {**LINE, "responses_create_params": {"input": "1+2=", "max_output_tokens": value}},
            {},
            "max_output_tokens .*write a positive integer, or leave it out",
        )
        for value in ("5", 0, -3, True, 2.5, [5])
    },
    "no address": (LINE, {"url": "gym:11000"}, "rollout_args.url is 'gym:11000'"),
}


@pytest.mark.bad_input
@pytest.mark.parametrize("case", LINES)
def test_a_line_or_an_address_that_gym_cannot_use(case, monkeypatch):
    monkeypatch.setattr(nemo_gym, "_PAUSE_SECONDS", 0.01)
    line, settings, words = LINES[case]
    with pytest.raises(DataError, match=words):
        samples(TWO_TURNS, line, count=1, **settings)


@pytest.mark.bad_input
@pytest.mark.parametrize("text", ["{a: [", "a: 2026-99-99", f"a: 1{'0' * 5000}", "!!python/object/apply:os.getpid []"])
def test_a_configuration_that_is_no_yaml(text, monkeypatch):
    async def answer(self: GymServer, request: Any) -> Any:
        return web.json_response(text)

    monkeypatch.setattr(GymServer, "_configuration", answer)
    with pytest.raises(DataError, match="the configuration of NeMo-Gym's head server at .* is not YAML"):
        samples(TWO_TURNS, count=1)


def test_the_reader_takes_messages_from_gyms_lines(tmp_path):
    parts = [{"type": "input_text", "text": "1+"}, {"type": "input_text", "text": "2="}]
    lines = [{"responses_create_params": {"input": one}} for one in ("1+2=", [{"role": "user", "content": parts}])]
    lines += [{"responses_create_params": {"input": [{"type": "function_call"}]}}, {"responses_create_params": {}}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    faults = Faults()
    read = list(iterate_records(tmp_path / "p.jsonl", ("responses_create_params.input",), faults, chat=True))
    assert [json.loads(one.texts[0]) for one in read] == [[{"role": "user", "content": "1+2="}]] * 2
    assert [one.line for one in read] == lines[:2], "the line stays whole"
    with pytest.raises(DataError, match=r"(?s):3.*has no role.*:4.*'input' is missing"):
        faults.check()


def gym_file() -> dict[str, Any]:
    file = file_of("grpo")
    file["policy"]["model_name"] = file["policy"]["tokenizer"]["name"] = "Qwen/Qwen2.5-1.5B"
    file["data"]["default"] |= {
        "dataset_name": "NemoGymDataset",
        "env_name": "nemo_gym",
        "processor": "nemo_gym_data_processor",
    }
    file["env"] = {"should_use_nemo_gym": True, "nemo_gym": {"config_paths": ["a.yaml"]}}
    return file


@pytest.mark.config
def test_a_file_of_nemo_rl_with_gym_converts_and_starts(tmp_path):
    done = converted(tmp_path, gym_file())
    assert done.settings["rollout_function"] == NEMO_GYM and "reward_function" not in done.settings
    assert done.settings["actor_train"]["data_args"]["messages"] == "responses_create_params.input"
    left = {one.key: one.kind for one in done.left_out}
    assert left["env.nemo_gym"] == "idle" and left["env.should_mask_flagged_samples"] == "refused"
    missing = {text.split(":")[0] for text in done.missing}
    assert {"rollout_args.url", "actor_infer.engine_args.urls"} <= missing
    assert jobs.what_stops(done.settings, jobs.PeerModels(tmp_path / "models"), tmp_path) == []


@pytest.mark.config
def test_gym_needs_addresses_and_vllm(tmp_path):
    settings = converted(tmp_path, gym_file()).settings
    for name, strategy, words in (
        ("urls", "vllm", "rollout_args.url: is missing.*engine_args.urls: is missing"),
        ("sglang", "sglang", "strategy_name: is sglang: NeMo-Gym's agents call a vLLM server"),
    ):
        settings["actor_infer"]["strategy_args"] = {"strategy_name": strategy}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(settings))
        with pytest.raises(ConfigFileError, match=f"(?s){words}"):
            load_config(tmp_path / f"{name}.yaml").check_runnable()
