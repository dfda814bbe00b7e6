"""`doctor --calibrate`: rates predict real steps, slow ranks and wrong files are named, plans follow files."""

from __future__ import annotations

import logging
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from roll_batching.planning import ParallelDims, PlanConstraints
from roll_batching.planning.pack_times import Cluster
from roll_batching.settings import MegatronConfig
from roll_batching.settings.cluster_file import read_cluster_file
from roll_batching.settings.model_cost import architecture_pack_times
from roll_batching.tools.simulation import Scenario, read_architecture, read_cluster
from tests.support.commands import run_command
from tests.support.ranks import ROOT, run_ranks

SHAPE = {"hidden_size": 64, "ffn_hidden_size": 192, "num_layers": 4, "num_attention_heads": 4, "vocab_size": 512}


def calibrate(payload: dict[str, Any]) -> Any:
    """Runs the command on this rank, in less time, and with a fault on rank 1."""
    import os

    import torch
    import torch.distributed as dist

    from roll_batching.cli import main
    from roll_batching.tools.doctor import calibration

    calibration.LONGEST_SECONDS, calibration.LONGEST_PACK = 0.04, 1024
    if payload["is_slow"] and os.environ["RANK"] == "1":
        matmul, gather = torch.matmul, dist.all_gather_into_tensor
        torch.matmul = lambda *a, **b: (time.sleep(0.004), matmul(*a, **b))[1]
        dist.all_gather_into_tensor = lambda *a, **b: (time.sleep(0.002), gather(*a, **b))[1]
    home, write_rates = Path(payload["home"]), calibration.write_rates
    calibration.write_rates = lambda *a: (time.sleep(2), write_rates(*a))
    try:
        main(["doctor", "--folder", str(home), "--model", str(home / "shape.yaml"), "--calibrate", payload["file"]])
    except SystemExit as end:
        sys.stdout.flush()
        # torchrun ends rank 0 when another one has failed
        return end.code if Path(payload["file"]).exists() else "ended before the file was written"


def train(payload: dict[str, Any]) -> tuple[list[float | None], list[str]]:
    """Trains the shape with a file of rates; returns predicted / measured of each step on this rank, and warnings."""
    import torch

    from roll_batching.losses import SFTLoss
    from roll_batching.samples import distribute, gather_lengths
    from roll_batching.strategy import MegatronTrainStrategy
    from tests.support.models import random_batch, worker_config

    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("roll_batching.strategy.step_prediction").addHandler(handler)
    role = worker_config("packed", 512, architecture=SHAPE | {"max_position_embeddings": 512},
                         megatron={"cluster": payload["file"]})  # fmt: skip
    strategy = MegatronTrainStrategy(role)
    strategy.initialize()
    whole, place = random_batch(0, 24, 500), strategy.layout
    local = whole.select(torch.arange(place.dp_rank, len(whole), place.dp_size))
    plan = strategy.plan(gather_lengths(local))
    local = distribute(local, plan)
    ratios = [strategy.train_step(local, plan, SFTLoss()).predicted_over_measured for _ in range(payload["steps"])]
    assert torch.isfinite(torch.tensor([ratio for ratio in ratios if ratio])).all()
    return ratios, warnings


def measure(home: Path, *, is_slow: bool) -> tuple[list[int], dict[str, Any]]:
    (home / "shape.yaml").write_text(yaml.safe_dump(SHAPE))
    file = home / "cluster.yaml"
    payload = {"home": str(home), "file": str(file), "is_slow": is_slow}
    for _ in range(3):  # other processes may take a core, until times fit no rates
        codes = run_ranks(2, "tests.tools.doctor.test_calibration:calibrate", payload)
        if file.exists():
            break
    return codes, yaml.safe_load(file.read_text())


def test_a_slow_rank_is_named_and_its_rates_are_those_of_the_file(tmp_path: Path) -> None:
    codes, content = measure(tmp_path, is_slow=True)
    assert codes == [1, 1] and list(content["slow_ranks"]) == [1] and content["slow_ranks"][1] > 1.5
    assert content["cluster"]["node_latency"] > 0.002 and content["cluster"]["devices_per_node"] == 2
    assert content["hosts"] and content["device"] == "CPU" and content["spread"].keys() >= {"node_latency"}


@pytest.mark.parametrize("floor", [0.0, 0.02])
def test_a_floor_that_no_pack_takes_is_no_measured_rate(floor: float) -> None:
    from roll_batching.tools.doctor.calibration import SMALL_SHAPE, _fit

    rates = {"matmul_rate": 5e10, "matmul_half_tokens": 40.0, "attention_rate": 3e10, "attention_tile": 1}
    truth = Cluster(**rates, layer_floor=floor)
    times = architecture_pack_times(SMALL_SHAPE, ParallelDims(), cluster=truth)
    packs = [(tokens // parts,) * parts for tokens in (64, 128, 256, 512, 1024, 2048) for parts in (1, 4, 16)]
    fitted = _fit(SMALL_SHAPE, {pack: [times.pack(np.array(pack), 1) / 1e9] * 3 for pack in packs})
    assert fitted["rates"].keys() == fitted["quartiles"].keys() | {"attention_tile"}
    assert fitted["rates"].get("layer_floor", 0.0) == pytest.approx(floor) and fitted["residual"] < 0.01


@pytest.mark.slow
def test_measured_rates_predict_steps_and_wrong_ones_are_named(tmp_path: Path, report: Any) -> None:
    for _ in range(3):  # other processes may take a core
        content = measure(tmp_path, is_slow=False)[1]
        file = str(tmp_path / "cluster.yaml")
        (ratios, warnings), (others, _) = run_ranks(
            2, "tests.tools.doctor.test_calibration:train", {"file": file, "steps": 12}
        )
        ratio = statistics.median(x for x in ratios if x is not None)
        if 0.6 < ratio < 1.6:
            break
    report(f"predicted / measured time of steps: {ratio:.2f}")
    assert 0.5 < ratio < 2 and not [x for x in others if x is not None]
    rates = content["cluster"] | {name: 20 * content["cluster"][name] for name in ("matmul_rate", "attention_rate")}
    content |= {"device": "NVIDIA H100", "cluster": rates | {"layer_floor": 0.0}}
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(content))
    payload = {"file": file, "steps": 40}
    (_, (warning,)), (_, none) = run_ranks(2, "tests.tools.doctor.test_calibration:train", payload)
    assert file in warning and "has the rates of NVIDIA H100, and this is CPU" in warning and none == []
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(content | {"device": "CPU"}))
    (_, (warning,)), _ = run_ranks(2, "tests.tools.doctor.test_calibration:train", payload)
    assert file in warning and "times shorter than the last 5" in warning and "doctor --calibrate" in warning


# ---- decisions


def plan_with(tmp_path: Path, rates: dict[str, float], count: int = 96, **sizes: Any) -> Any:
    """The plan of a job with rates of a file, equal to that of `simulate --cluster`."""
    file = tmp_path / "rates.yaml"
    file.write_text(yaml.safe_dump({"date": "today", "device": "X", "cluster": rates}))
    of_job = MegatronConfig.model_validate({"cluster": str(file)}).cluster
    assert of_job is not None and of_job.rates == read_cluster(str(file)) and of_job.device == "X"
    lengths = np.random.default_rng(1).lognormal(np.log(1500), 1.4, count).clip(32, 16000).astype(int)
    constraints = PlanConstraints(max_tokens=16384, smallest_slice=of_job.rates.slice_tokens, **sizes)
    shape = read_architecture("qwen3-8b")
    return Scenario(lengths=lengths, constraints=constraints, architecture=shape, cluster=of_job.rates).plan()


def test_sizes_micro_batches_slices_and_balance_follow_a_file(tmp_path: Path) -> None:
    slow = {"node_bandwidth": 1e9, "network_bandwidth": 1e9, "node_latency": 1e-3, "network_latency": 1e-3}
    by_network = [
        plan_with(tmp_path, rates, count=12, dp_size=8, max_cp_size=8).cp_sizes.mean()
        for rates in ({"matmul_rate": 5.9e14}, slow)
    ]
    assert by_network[0] > 1.5 * by_network[1]
    fixed = [{"matmul_half_tokens": tokens} for tokens in (20.0, 20_000.0)]
    counts = [plan_with(tmp_path, rates, dp_size=2, pp_size=4).report.num_micro_batches for rates in fixed]
    assert counts[0] > counts[1]
    slices = [plan_with(tmp_path, rates, dp_size=2, pp_size=4, pipeline_slices="auto").slices for rates in fixed]
    assert slices[0] is not None and (slices[1] is None or slices[0].counts.sum() > slices[1].counts.sum())
    costs = [plan_with(tmp_path, {"attention_rate": rate}, dp_size=8).costs for rate in (4e14, 1e13)]
    assert costs[0].max() < costs[1].max()


# ---- files


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "no such file of rates; check its path, or measure: `roll-batching doctor --calibrate"),
        ("cluster: {matmul_rat: 4e14}", "did you mean 'matmul_rate'"),
        ("cluster: {matmul_rate: 4e14, matmul_rate: 5e14}", "line 1: cluster.matmul_rate is written 2 times"),
        ("cluster: {node_latency: 25}", "did you mean 2.5e-05"),
        ("matmul_rate: 4e14\ncluster: {node_latency: 1e-5}", "'matmul_rate' stands beside `cluster`"),
    ],
)
def test_a_wrong_file_is_named_with_its_key(tmp_path: Path, text: str | None, words: str) -> None:
    file = tmp_path / "rates.yaml"
    if text is not None:
        file.write_text(text)
    for read in (read_cluster, read_cluster_file, lambda path: MegatronConfig.model_validate({"cluster": path})):
        with pytest.raises(ValueError) as error:  # noqa: PT011
            read(str(file))
        assert str(file) in str(error.value) and words in str(error.value)


def test_simulate_says_where_rates_were_measured(tmp_path: Path) -> None:
    file = tmp_path / "rates.yaml"
    file.write_text("date: yesterday\ndevice: X\ncluster: {matmul_rate: 4e14, slice_tokens: 64}")
    given = ("--lengths", ROOT / "examples" / "lengths.csv", "--model", "qwen3-8b", "--cluster", file)
    shown = run_command("simulate", *given).stdout
    assert f"{file}, whose rates were measured on yesterday on X (estimates: matmul_half_tokens, " in shown
    for wrong in (("--model", "qwen3-8b"), ("--calibrate", file, "--full")):
        assert run_command("doctor", *wrong).returncode == 2
    kept = run_command("doctor", "--calibrate", file)
    assert kept.returncode == 2 and "was not written by" in kept.stderr + kept.stdout
