"""Small real jobs of the kill campaign: their processes, metrics and samples."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.huggingface import tiny
from tests.jobs.launch.clusters import on_ray, ranks
from tests.jobs.launch.commands import ROOT, processes
from tests.jobs.observe.rows import TIMES
from tests.jobs.rl.jobs import settings as rl_settings
from tests.jobs.rl.jobs import write_data as write_rl_data
from tests.jobs.streams.jobs import settings as stream_settings
from tests.jobs.streams.jobs import write_data as write_stream_data

RANKS = 2
_FUNCTIONS = "tests.jobs.rollouts.rollout_functions"
COUNTS = ("engine_replicas", "engine_dropped", "engine_requests", "engine_failed_attempts")
"""Metrics of servers and attempts, which differ after a kill."""


SMALL = {
    "max_steps": 6,
    "save_steps": 2,
    "response_length": 8,
    "rollout_samples": -1,
    "eval_samples": 0,
    "reward_function": "tests.jobs.rl.jobs:length",
}
"""Settings of the RL jobs; every response is written with its reward."""


def grpo(folder: Path) -> dict[str, Any]:
    """Synchronous GRPO after a warm-up, with two reward processes per rank."""
    write_rl_data(folder)
    return rl_settings(
        folder,
        **SMALL,
        reward_workers=2,
    )


def pairs(folder: Path) -> dict[str, Any]:
    """DPO on a stream, with one loader process per rank."""
    write_stream_data(folder, 37)
    job = stream_settings(folder, "dpo", save_steps=3, eval_steps=0)
    del job["max_steps"], job["actor_train"]["use_sequence_packing"], job["actor_train"]["sequence_packing_args"]
    del job["actor_train"]["training_args"]["per_device_train_batch_size"]
    policy = {
        "enable_dp_load_balancing": True,
        "load_balanced_pool_size": 6,
        "load_balanced_max_tokens_for_batch": 112,
        "load_balanced_batches_per_optimizer_step": 2,
        "dataloader_num_workers": 1,
    }
    return job | {"train": {"max_num_steps": 9, "sequence_packing": True, "train_policy": policy}}


def blocks(folder: Path) -> dict[str, Any]:
    """Supervised training in packs with their own context-parallel sizes, some on one rank and some on both."""
    write_stream_data(folder, 37)
    sizes = {"context_parallel_size": "auto"}
    job = stream_settings(folder, "sft", max_steps=9, save_steps=3, eval_steps=0)
    job["actor_train"]["sequence_packing_args"] = {"max_packed_sequence_length_train": 40}
    return job | {"actor_train": job["actor_train"] | {"strategy_args": {"strategy_config": sizes}}}


def engine(folder: Path) -> dict[str, Any]:
    """Synchronous GRPO with rollouts by two servers, whose URLs are in the file `urls`."""
    write_rl_data(folder)
    tiny.write_model(folder / "model", "qwen3")
    tiny.write_tokenizer(folder / "model")
    data = rl_settings(
        folder,
        **SMALL,
        pretrain=str(folder / "model"),
        warmup=None,
    )
    del data["tokenizer"]
    data["actor_train"]["model_args"] = {}
    urls = json.loads((folder / "urls").read_text())
    data["actor_infer"] = {"strategy_args": {"strategy_name": "sglang"}, "engine_args": {"urls": urls}}
    return data


def critic(folder: Path) -> dict[str, Any]:
    """PPO with a critic, whose samples a rollout function makes and scores."""
    job = grpo(folder) | {
        "adv_estimator": "gae",
        "rollout_function": f"{_FUNCTIONS}:three_turns",
        "sequence_length": 80,
    }
    del job["reward_function"]
    packing = {"max_packed_sequence_length_train": 128}
    trained = {"learning_rate": 2e-3, "per_device_train_batch_size": 3}
    return job | {"critic": {"training_args": trained, "use_sequence_packing": True, "sequence_packing_args": packing}}


def student(folder: Path) -> dict[str, Any]:
    """Distillation of a teacher whose parallel layout is not the student's."""
    write_rl_data(folder)
    for name, model in (("student", "qwen3"), ("teacher", "llama3")):
        tiny.write_model(folder / name, model)
        tiny.write_tokenizer(folder / name)
    given = {**SMALL, "task": "distill", "logits_topk": 8, "num_return_sequences_in_group": 1, "rollout_batch_size": 8}
    job = rl_settings(folder, **given, pretrain=str(folder / "student"))
    for key in ("tokenizer", "warmup", "adv_estimator", "reward_function"):
        del job[key]
    job["actor_train"]["model_args"] = {}
    job["teacher"] = {
        "model_args": {"model_name_or_path": str(folder / "teacher")},
        "strategy_args": {"strategy_config": {"tensor_model_parallel_size": 2}},
        "use_sequence_packing": True,
        "sequence_packing_args": {"max_packed_sequence_length_forward": 160},
    }
    return job


JOBS = {"grpo": grpo, "pairs": pairs, "blocks": blocks, "engine": engine, "critic": critic, "student": student}


@contextlib.contextmanager
def servers(folder: Path, count: int = 2) -> Iterator[list[psutil.Process]]:
    """Start `count` engine servers with the model of the job `engine`; write their URLs to `urls`."""
    tiny.write_model(folder / "model", "qwen3")
    tiny.write_tokenizer(folder / "model")
    started = []
    try:
        for _ in range(count):
            command = [sys.executable, "-m", "tests.jobs.engines.server", str(folder / "model")]
            started.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True))
        urls = [json.loads(one.stdout.readline())[0] for one in started if one.stdout]
        (folder / "urls").write_text(json.dumps(urls))
        yield [psutil.Process(one.pid) for one in started]
    finally:
        for one in started:
            one.kill()
            one.wait()


def command(way: str, job: Path, address: str) -> list[str]:
    """Arguments of python to run `job` on two ranks."""
    cli = ["-m", "roll_batching.cli", "train", "--config", str(job)]
    if way == "torchrun":
        return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS), *cli]
    if way == "ray":
        return on_ray(job, ranks=RANKS, address=address, restarts=2)
    return [*cli, "--nproc", str(RANKS)]


@dataclass
class Running:
    """A running job: folder, process of its command, Ray cluster, engines."""

    folder: Path
    process: subprocess.Popen[str]
    cluster: Any = None
    engines: list[psutil.Process] = field(default_factory=list)

    @property
    def run(self) -> Path:
        """Folder of the run."""
        return self.folder / "runs" / "tiny"

    @property
    def output(self) -> str:
        """Output of the command so far."""
        return (self.folder / "said").read_text()

    def steps(self) -> int:
        """Number of rows in the metrics."""
        metrics = self.run / "metrics.jsonl"
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0

    def victims(self, kind: str) -> list[psutil.Process]:
        """Live processes of a kind; none after the end of the job."""
        if self.process.poll() is not None:
            return []
        if kind == "engine":
            return self.engines
        if kind in ("launcher", "driver"):
            return [psutil.Process(self.process.pid)]
        if kind == "node":
            at_work = {rank.ppid() for rank in ranks()}
            raylets = [node.all_processes["raylet"][0].process.pid for node in self.cluster.worker_nodes]
            return [psutil.Process(pid) for pid in raylets if pid in at_work]
        if self.cluster is not None and kind == "rank":
            return ranks()
        children = {child.pid for child in psutil.Process(self.process.pid).children()}
        mine = [one for one in processes(self.folder) if _is(kind, one, children)]
        return sorted(mine, key=lambda one: one.pid)

    def kill(self, kind: str, victim: psutil.Process) -> None:
        """Send SIGKILL; a node is killed with all its processes."""
        if kind != "node":
            victim.kill()
            return
        (node,) = [
            node for node in self.cluster.worker_nodes if node.all_processes["raylet"][0].process.pid == victim.pid
        ]
        everything = victim.children(recursive=True)
        self.cluster.remove_node(node, allow_graceful=False)
        for one in everything:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()

    def left(self) -> list[psutil.Process]:
        """Live processes of the job."""
        return [*processes(self.folder), *(ranks() if self.cluster is not None else [])]


def _is(kind: str, process: psutil.Process, of_launcher: set[int]) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        words = " ".join(process.cmdline())
        if kind == "reward worker":
            return "rewards.worker" in words
        if kind == "rank":
            return process.pid in of_launcher and "roll_batching.cli" in words
        return kind == "loader" and process.ppid() in of_launcher and "pt_data_worker" in process.name()
    return False


def rows_of(run: Path) -> list[dict[str, Any]]:
    """Metrics of a run, without times and counts of failures."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    left_out = {*TIMES, *COUNTS, "critic_train_seconds", "teacher_seconds"}
    return [{key: value for key, value in json.loads(line).items() if key not in left_out} for line in lines]


def samples_of(run: Path) -> list[str]:
    """Lines of rollouts.jsonl: the responses that each step trained on."""
    file = run / "rollouts.jsonl"
    return file.read_text().splitlines() if file.exists() else []
