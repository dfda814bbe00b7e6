"""Our rollout function against NeMo-Gym's own servers and vLLM's on a CPU: rewards, tokens, turns, ended servers.

`scripts/gym_environment.sh` and `scripts/engine_environment.sh` make the environments; without them these tests are
skipped.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from roll_batching.errors import DataError
from roll_batching.jobs.config.rollout_keys import NEMO_GYM
from roll_batching.jobs.observe.run_files import read_metrics
from tests.huggingface import tiny
from tests.huggingface.test_job import job
from tests.jobs.engines.test_vllm_itself import PROGRAM, QWEN2, ROOT, Server
from tests.jobs.rl.jobs import write_data
from tests.jobs.rollouts.test_nemo_gym import roll_out
from tests.support.ranks import run_ranks

GYM = ROOT / ".venv-gym"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.engines,
    pytest.mark.skipif(not PROGRAM.exists(), reason="needs .venv-engines: ./scripts/engine_environment.sh"),
    pytest.mark.skipif(not (GYM / "bin" / "gym").exists(), reason="needs .venv-gym: ./scripts/gym_environment.sh"),
]

SERVERS = (
    "resources_servers/equivalence_rule",
    "resources_servers/example_multi_turn_gymnasium",
    "responses_api_agents/simple_agent",
    "responses_api_agents/gymnasium_agent",
    "responses_api_models/vllm_model",
    "environment_servers/legacy_agent",
)
CONFIGS = (
    "resources_servers/equivalence_rule/configs/lc.yaml",
    "resources_servers/example_multi_turn_gymnasium/configs/example_multi_turn_gymnasium.yaml",
    "responses_api_models/vllm_model/configs/vllm_model_for_training.yaml",
)
ONE_TURN, MANY_TURNS = "lc_equivalence_rule_simple_agent", "example_multi_turn_gymnasium_agent"
CHARACTERS = "".join(tiny.TEXT.split()) + "<>:ABCDEFGHIJKLMNO"
"""One for each token of the model and no blank, so that a text is tokenized to the tokens that were sampled."""
LETTERS, END = "abcdefghijklmnopqrstuvwxyz", CHARACTERS.index("$")
TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] + ':' + message['content'] + '$' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'a:' }}{% endif %}"
)


def write_tokenizer(folder: Path) -> None:
    """A tokenizer of CHARACTERS whose only special token is the end token."""
    from tokenizers import Regex, Tokenizer
    from tokenizers.decoders import Fuse
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast

    fast = Tokenizer(WordLevel({token: number for number, token in enumerate(CHARACTERS)}, unk_token="$"))
    fast.pre_tokenizer = Split(Regex("."), "isolated")
    fast.decoder = Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="$", pad_token="$", unk_token="$")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)


class Gym:
    """A process of `gym env start` and the servers that it starts."""

    def __init__(self, folder: Path, engine: str, model: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url, self.log = f"http://127.0.0.1:{port}", folder / "gym.log"
        for server in SERVERS:  # the environments that Gym finds, so that it installs none
            (folder / "environments" / server).mkdir(parents=True)
            (folder / "environments" / server / ".venv").symlink_to(GYM)
        settings = {
            "config_paths": f"[{','.join(CONFIGS)}]",
            "policy_base_url": f"{engine}/v1",
            "policy_api_key": "none",
            "policy_model_name": model,
            "policy_model.responses_api_models.vllm_model.request_prompt_and_generation_token_ids": "true",
            "lc_equivalence_rule.resources_servers.equivalence_rule.grading_rule": "seq_match",
            "uv_venv_dir": folder / "environments",
            "skip_venv_if_present": "true",
            "head_server.host": "127.0.0.1",
            "head_server.port": port,
        }
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                [GYM / "bin" / "gym", "env", "start", *(f"++{name}={value}" for name, value in settings.items())],
                stdout=output,
                stderr=output,
                cwd=folder,
                env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"},
                start_new_session=True,
            )

    def wait(self) -> Gym:
        """Waits until all servers answer."""
        until = time.monotonic() + 300
        while time.monotonic() < until:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/readyz", timeout=5):
                return self
            time.sleep(0.5)
        raise AssertionError(self.log.read_text()[-3000:])

    def process_of(self, server: str) -> int:
        """Number of the process of the server `server`, whose shell Gym has started."""
        with urllib.request.urlopen(f"{self.url}/server_instances", timeout=5) as reply:
            (number,) = (one["pid"] for one in json.load(reply) if one["process_name"] == server)
        return int(number)

    def stop(self) -> None:
        """Ends Gym as Ctrl-C does, with its servers and its Ray."""
        self.process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(60)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("gym") / "model"
    tiny.write_model(folder, "first", model=("Qwen2", QWEN2))
    tiny.edit_config(folder, eos_token_id=END)
    (folder / "generation_config.json").unlink()
    write_tokenizer(folder)
    server = Server(folder, folder.parent / "engine.log")
    try:
        yield server.wait()
    finally:
        server.kill()


@pytest.fixture(scope="module")
def gym(engine: Server) -> Iterator[Gym]:
    folder = engine.log.parent
    made = Gym(folder, engine.url, str(folder / "model"))
    try:
        yield made.wait()
    finally:
        made.stop()


def line(first: int, second: int, **more: Any) -> dict[str, Any]:
    content = f"{first}+{second}="
    return {"responses_create_params": {"input": [{"role": "user", "content": content}]}, **more}


def train(
    folder: Path, gym: Gym, engine: Server, lines: list[dict[str, Any]], agent: str | None = None, **changes: Any
) -> tuple[Any, Any]:
    """Rows of metrics.jsonl and of rollouts.jsonl of a job on two ranks with one optimizer step per RL step."""
    write_data(folder)
    for name, some in (("train", lines), ("held", lines[:2])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in some))
    made = job(
        folder,
        warmup=None,
        max_steps=3,
        rollout_samples=-1,
        response_length=10,
        sequence_length=80,
        rollout_function=NEMO_GYM,
        rollout_args={"url": gym.url, "agent": agent},
        actor_infer={"strategy_args": {"strategy_name": "vllm"}, "engine_args": {"urls": [engine.url]}},
        actor_train__training_args__per_device_train_batch_size=6,
        **changes,
    )
    made["pretrain"] = str(engine.log.parent / "model")
    made["actor_train"]["data_args"] = {
        "file_name": str(folder / "train.jsonl"),
        "eval_file_name": str(folder / "held.jsonl"),
        "messages": "responses_create_params.input",
    }
    del made["reward_function"]
    run_ranks(2, "tests.jobs.rl.jobs:run", made)
    run = folder / "runs" / "tiny"
    rollouts = [json.loads(one) for one in (run / "rollouts.jsonl").read_text().splitlines()]
    return read_metrics(run / "metrics.jsonl"), rollouts


def test_a_job_trains_on_the_rewards_of_an_environment(gym, engine, tmp_path, report):
    """One turn. The environment scores by the likeness of texts, which this test computes from our texts."""
    routes = ({"task_source": "lc_equivalence_rule"}, {"task_source": ONE_TURN}, {"agent_ref": {"name": ONE_TURN}})
    answers = {(i, j): LETTERS[i:] + str(i) + LETTERS[:j] + str(j) for i in range(2, 5) for j in range(1, 5)}
    lines = [line(i, j, expected_answer=text, **routes[(i + j) % 3]) for (i, j), text in answers.items()]
    rows, rollouts = train(tmp_path, gym, engine, lines, eval_steps=3, eval_samples=2)
    steps = [row for row in rows if "grad_norm" in row]
    gap = max(row["engine_gap_max"] for row in steps)
    report(f"log-probs against the trainer's, after each of {len(steps)} updates: {gap:.1e}")
    assert len(steps) == 3 and gap < 5e-5 and all(row["grad_norm"] > 0 for row in steps)
    assert len(rollouts) >= 3 * 12 and len({one["reward"] for one in rollouts}) > 5
    for one in rollouts:
        answer = answers[int(one["prompt"][2]), int(one["prompt"][4])]
        expected = difflib.SequenceMatcher(None, one["response"].lower(), answer).ratio()
        assert one["reward"] == pytest.approx(expected, abs=1e-6), one
    sampled = [one["reward"] for one in rollouts if one["kind"] == "train" and one["step"] == 1]
    assert steps[0]["reward"] == pytest.approx(sum(sampled) / len(sampled))


def test_turns_are_trained_on_as_they_were_sampled(gym, engine, tmp_path, report):
    """Three turns: the environment's messages between them are read and not trained on."""
    lines = [line(i, j, follow_ups=["on", "more"], expected_answer="e") for i in range(2, 5) for j in range(1, 5)]
    rows, rollouts = train(tmp_path, gym, engine, lines, MANY_TURNS, actor_train__logprob_plan="rollout")
    ratio, kl = (max(row[name] for row in rows) for name in ("ratio_max", "approx_kl"))
    report(f"largest ratio to the samples' log-probs, which the loss read: 1 + {ratio - 1:.1e}, KL {kl:.1e}")
    assert len(rows) == 3 and ratio < 1 + 5e-5 and kl < 1e-8 and any(row["grad_norm"] > 0 for row in rows)
    assert {one["reward"] for one in rollouts} == {0.0, 1.0}
    for one in rollouts:
        assert one["turns"] == 3 and 3 <= one["response_tokens"] <= 30
        first, second, third = (part for text in one["response"].split("u:on$a:") for part in text.split("u:more$a:"))
        assert max(map(len, (first, second, third))) <= 11, "an end token, and ten others"
        assert one["reward"] == float("e" in third.lower())


def test_the_cause_of_an_error_is_shown(gym):
    tools = line(1, 2, expected_answer="3")
    tools["responses_create_params"]["tools"] = [{"type": "function", "name": "f", "parameters": {}, "strict": True}]
    with pytest.raises(DataError, match=f"agent {ONE_TURN} .*500: .*tool choice requires --enable-auto-tool-choice"):
        roll_out(gym.url, tools, agent=ONE_TURN)
    wrong = line(1, 2, expected_answer="3")
    wrong["responses_create_params"]["tempo"] = 1
    with pytest.raises(DataError, match="status 422: .*tempo.*Extra inputs are not permitted"):
        roll_out(gym.url, wrong, agent=ONE_TURN)
    with pytest.raises(DataError, match="no output item .* has generation_token_ids .*raise sequence_length"):
        roll_out(gym.url, line(1, "2" * 300, expected_answer="3"), agent=ONE_TURN)


def test_servers_that_end_are_named(gym, engine):
    """The last test: it ends the engine, an agent, and Gym. A stopped engine keeps rollouts waiting until its end."""
    ask = line(1, 2, expected_answer="3")
    os.killpg(engine.process.pid, signal.SIGSTOP)
    threading.Timer(3.0, engine.kill).start()
    with pytest.raises(
        DataError, match=f"agent {ONE_TURN} .* waits for the engine at {engine.url}/v1, which has ended"
    ):
        roll_out(gym.url, ask, agent=ONE_TURN)
    os.kill(gym.process_of(ONE_TURN), signal.SIGKILL)
    with pytest.raises(DataError, match=f"agent {ONE_TURN} .* did not answer in 3 attempts: .*see Gym's log"):
        roll_out(gym.url, ask, agent=ONE_TURN)
    gym.stop()
    with pytest.raises(DataError, match=f"head server at {gym.url} did not answer in 3 attempts: .*start Gym before"):
        roll_out(gym.url, ask, agent=ONE_TURN)
