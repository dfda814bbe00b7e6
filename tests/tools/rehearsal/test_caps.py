"""Auto caps: the largest that fit, against real steps; agreed by ranks, kept by checkpoints, refused elsewhere."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from roll_batching.cli import main
from roll_batching.errors import ConfigError, RankError
from roll_batching.jobs.config import config_from_dict
from roll_batching.tools.rehearsal.advice import caps_of
from roll_batching.tools.rehearsal.caps import engine_memory, find_caps
from roll_batching.tools.rehearsal.job import rehearse_job
from roll_batching.tools.rehearsal.task import RankTask
from tests.jobs.launch.commands import trained
from tests.jobs.rl.jobs import settings, write_data
from tests.support.ranks import run_ranks
from tests.tools.rehearsal.jobs import EXPERTS, job_of
from tests.tools.rehearsal.test_accuracy import ADAPTERS, KL, PP2
from tests.tools.rehearsal.test_advice import FakeRehearse, memory_for
from tests.tools.rehearsal.test_images import vision_job

pytestmark = pytest.mark.rehearse

MIB = 1 << 20
TRAIN = "actor_train.sequence_packing_args.max_packed_sequence_length_train"
AUTO = {"use_sequence_packing": True, "sequence_packing_args": {"max_packed_sequence_length_train": "auto"}}
BOTH = {"max_packed_sequence_length_train": "auto", "max_packed_sequence_length_forward": "auto"}
CRITIC = AUTO | {"sequence_packing_args": BOTH, "training_args": {"per_device_train_batch_size": 64}}
SFT: dict[str, Any] = {"task": "sft", "sequence_length": 200}
ROWS = {"training_args": {"per_device_train_batch_size": 64, "learning_rate": 1e-3}}
CP2 = {"context_parallel_size": 2}
FEW_ROLLOUTS = {"rollout_batch_size": 4}

JOBS: dict[str, tuple[dict[str, Any], int, int]] = {
    "dense": (job_of(batching=AUTO, train=ROWS, **SFT), 1, 110),
    "experts": (job_of(batching=AUTO, train=ROWS, architecture=EXPERTS, **SFT), 1, 110),
    "LoRA": (job_of(batching=AUTO, train=ROWS | ADAPTERS, **FEW_ROLLOUTS, **KL), 1, 110),
    "critic": (job_of(batching=AUTO, train=ROWS, adv_estimator="gae", critic=CRITIC, **FEW_ROLLOUTS), 1, 110),
    "images": (vision_job(batching=AUTO, train=ROWS, **SFT), 1, 110),
    "pipeline": (job_of(batching=AUTO, train=ROWS, megatron=PP2, **SFT), 2, 110),
}
"""Jobs with their number of processes and MiB of memory."""


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_found_caps_are_within_5_percent_of_the_largest_that_run(name: str, report: Any) -> None:
    job, world, memory = JOBS[name]
    config, limit = config_from_dict(job), memory * MIB
    found = find_caps(config, limit, partial(rehearse_job, world_size=world, device="cpu"))

    def measure(scale: float) -> dict[str, float]:
        """Largest real peak of all ranks over the phases that each cap bounds, with caps times `scale`."""
        scaled = config.with_resolved_caps({key: round(scale * cap / 4) * 4 for key, cap in found.caps.items()})
        task = RankTask(config=scaled, rank=0, world_size=world, device="cpu")
        reports = run_ranks(world, "tests.tools.rehearsal.jobs:measured", task)
        return {
            cap.key: max(one.peaks[phase].bytes for one in reports for phase in cap.phases if phase in one.peaks)
            for cap in caps_of(scaled, found.rehearsal.dims)
            if cap.key in found.caps
        }

    below, above = measure(0.95), measure(1.05)
    assert set(below) == set(found.caps)
    for key, cap in found.caps.items():
        real = cap * (0.95 + 0.1 * (limit - below[key]) / (above[key] - below[key]))
        report(f"{name}: {key} = {cap}, {cap / real - 1:+.1%} of the largest that runs, in {found.probes} rehearsals")
        assert below[key] <= limit < above[key]


def test_one_search_for_each_key_over_the_phases_that_it_bounds() -> None:
    """0.5 and 0.1 MiB per token, and a quadratic term; the forward cap of the policy bounds no phase."""
    reference = {**AUTO, "sequence_packing_args": {"max_packed_sequence_length_forward": "auto"}}
    job = job_of(batching=AUTO | {"sequence_packing_args": BOTH}, train=ROWS, use_kl_loss=True, reference=reference)
    config = config_from_dict(job | {"prompt_length": 500, "response_length": 1500, "rollout_batch_size": 4096})
    rehearse = FakeRehearse(world_size=1)
    memory = memory_for(rehearse(config.with_resolved_caps(dict.fromkeys(REFERRED, 2048))), 6000)
    found = find_caps(config, memory, rehearse)
    assert list(found.caps) == REFERRED, "training first"
    train, forward, of_reference = found.caps.values()
    assert 0.98 * 11726 <= train <= 11726 and train == forward and 0.98 * 60000 <= of_reference <= 60000
    assert len(rehearse.jobs) <= 8
    with pytest.raises(ConfigError, match=f"no cap fits 600 MiB.* 2,048 tokens, need more .*{TRAIN}: "):
        find_caps(config, 600 * MIB, rehearse)
    need = rehearse(config.with_resolved_caps(dict.fromkeys(REFERRED, 2048))).worst.need
    with pytest.raises(ConfigError) as error:
        find_caps(config, need - 1, rehearse)
    fits, needs = re.findall(r"([\d,]+) MiB", str(error.value))
    assert fits < needs, "also where less than a MiB is missing"


FORWARD = "sequence_packing_args.max_packed_sequence_length_forward"
REFERRED = [TRAIN, f"actor_train.{FORWARD}", f"reference.{FORWARD}"]


def resolve(jobs: list[dict[str, Any]]) -> list[Any]:
    """On a rank: the caps of each job, or the error."""
    from roll_batching.jobs.launch.rendezvous import rank_info, wait_for_ranks
    from roll_batching.tools.rehearsal.caps import resolve_caps

    info, results = rank_info(), []
    store = wait_for_ranks(info, 1.0)
    for number, job in enumerate(jobs):
        from torch.distributed import PrefixStore

        try:
            config = resolve_caps(config_from_dict(job), info, PrefixStore(str(number), store))
            results.append(dict(config.resolved_caps))
        except RankError as error:
            results.append(str(error))
    return results


def test_all_ranks_get_the_caps_or_the_error_of_one() -> None:
    """The mini-batch of a rank is one sample, so that one rehearsal is enough."""
    job = job_of(batching=AUTO, train={"training_args": {"per_device_train_batch_size": 1}}, **SFT)
    first, second = run_ranks(2, f"{__name__}:resolve", [job, job | {"device_memory_limit": "64MiB"}])
    assert first == second
    assert "device_memory_limit" in first[0] and "is missing" in first[0] and "such as 4GiB" in first[0]
    assert first[1] == {TRAIN: 256}


def lower(spares: list[list[float]]) -> list[dict[str, int]]:
    """On a rank: the caps after a first step that left this rank's part of each of `spares`."""
    import torch.distributed as dist

    from roll_batching.jobs.run.lowered_caps import lower_caps

    dist.init_process_group("gloo")
    caps = {TRAIN: 4096, FORWARD: 520}
    return [lower_caps(caps, share[dist.get_rank()], 512, dist.group.WORLD) for share in spares]


def test_caps_are_lowered_on_all_ranks_where_one_had_little_memory_left() -> None:
    first, second = run_ranks(2, f"{__name__}:lower", [[0.2, 0.03], [0.2, 0.01]])
    assert first == second == [{TRAIN: 4096, FORWARD: 520}, {TRAIN: 3584, FORWARD: 512}]


def run_with_little_memory(payload: dict[str, Any]) -> None:
    """On a rank: a job with resolved caps, whose first step leaves no memory."""
    from roll_batching.jobs.job import run_job
    from roll_batching.jobs.run import context

    context.spare_share = lambda config, device: 0.0  # a CPU's peak is not measured
    run_job(config_from_dict(payload["job"]).with_resolved_caps(payload["caps"]))


@pytest.mark.slow
def test_lowered_caps_hold_the_longest_sample_and_are_those_of_models_on_these_ranks(tmp_path: Path) -> None:
    """Samples of 63 tokens need 64 under CP 2. The reference has processes of its own, which keep their cap."""
    write_data(tmp_path)
    packed = {"sequence_packing_args": {"max_packed_sequence_length_forward": "auto"}, "use_sequence_packing": True}
    keys = {"prompt_length": 39, "warmup": None, "eval_samples": 0, "use_kl_loss": True, "kl_loss_coef": 0.1}
    train = {"actor_train__sequence_packing_args": BOTH, "actor_train__logprob_plan": "own"}
    train |= {"actor_train__device_mapping": [0, 1], "actor_train__strategy_args": {"strategy_config": CP2}}
    apart = packed | {"device_mapping": "2", "strategy_args": {"strategy_config": {"context_parallel_size": 1}}}
    job = settings(tmp_path, max_steps=2, save_steps=2, reference=apart, **keys, **train)
    caps = dict(zip(REFERRED, (64, 128, 256), strict=True))
    run_ranks(2, f"{__name__}:run_with_little_memory", {"job": job, "caps": caps})
    record = json.loads((tmp_path / "runs/tiny/checkpoints/rl-000002/job.json").read_text())
    assert list(record["caps"].values()) == [64, 112, 256]


def test_engines_on_the_same_devices_count() -> None:
    def held(strategy: dict[str, Any], **keys: Any) -> float:
        engine = {"strategy_args": strategy}
        return engine_memory(
            config_from_dict(job_of(batching=AUTO, actor_infer=engine, pretrain="model", **keys)), 1000
        )

    half = {"strategy_name": "vllm", "strategy_config": {"gpu_memory_utilization": 0.5}}
    assert held(half) == 500 and held(half, is_offload_states=True) == 1 << 30
    assert held({"strategy_name": "megatron_infer"}) == 0
    with pytest.raises(ConfigError, match="gpu_memory_utilization: is missing"):
        held({"strategy_name": "vllm"})
    with pytest.raises(ConfigError, match="actor_infer: samples with a copy of the model"):
        held({"strategy_name": "hf_infer"})


@pytest.mark.bad_input
def test_auto_is_refused_where_nothing_resolves_it() -> None:
    config = config_from_dict(job_of(batching=AUTO, **SFT))
    with pytest.raises(ConfigError, match="_train is auto, which only `roll-batching train`.*`roll-batching fit"):
        config.actor_train.batching()
    with pytest.raises(ConfigError, match="infer_batch_size: expected a whole number"):
        config_from_dict(job_of(batching={"infer_batch_size": "auto"}, **SFT))
    with pytest.raises(ConfigError, match="device_memory_limit: '4 apples' is not a size"):
        config_from_dict(job_of(batching=AUTO, device_memory_limit="4 apples", **SFT))


@pytest.mark.slow
def test_a_run_and_its_continuation_have_equal_caps(tmp_path: Path) -> None:
    keys = {"task": "sft", "sequence_length": 64, "warmup": None, "save_steps": 1, "device_memory_limit": "3MiB"}
    data = {"file_name": str(tmp_path / "corpus.jsonl"), "response": "response"}
    auto = {"actor_train__sequence_packing_args__max_packed_sequence_length_train": "auto"}
    code, output = trained(tmp_path, **keys, **auto, actor_train__data_args=data)
    assert code == 0 and f"rehearsals: {TRAIN}=192" in output, output
    code, output = trained(
        tmp_path, "max_steps=3", "resume_from_checkpoint=true", **keys, **auto, actor_train__data_args=data
    )
    assert code == 0 and "auto caps, as in " in output and "max_packed" not in output.split("with changes")[-1], output
    for step in (1, 3):
        record = json.loads((tmp_path / f"runs/tiny/checkpoints/sft-{step:06d}/job.json").read_text())
        assert record["caps"] == {TRAIN: 192}


@pytest.mark.slow
def test_fit_ranks_layouts_with_caps_that_rehearse(capsys: Any) -> None:
    job = ["--config", "configs/dpo_demo.yaml", "--gpu-memory", "4GiB", "--world-size", "2"]
    with pytest.raises(SystemExit) as end:
        main(["fit", *job, "--layouts", "1", "--json"])
    assert end.value.code == 0
    first, second = json.loads(capsys.readouterr().out)["layouts"]
    assert first["seconds"] <= second["seconds"] and first["need"] <= 4 << 30
    assert first["dims"] != second["dims"] and first["caps"][TRAIN] >= 256
    with pytest.raises(SystemExit) as end:
        main(["fit", *job, "--layouts", "0", "--gpu-memory", "100MiB"])
    assert end.value.code and "no layout fits 100MiB" in capsys.readouterr().err
