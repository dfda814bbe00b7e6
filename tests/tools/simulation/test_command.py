"""`roll-batching simulate`: output, files, sweeps, and errors."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from roll_batching.cli import main
from roll_batching.errors import ConfigError
from roll_batching.planning import PlanConstraints
from roll_batching.tools.simulation import Scenario, read_architecture, run_sweep
from roll_batching.tools.simulation.report import BACKWARD, EXCHANGE, FORWARD, MOST_LANES, chosen_ranks, draw_timeline
from roll_batching.tools.simulation.scenario import parse_sweep

OPTIONS = ["simulate", "--model", "qwen3-1.7b", "--max-tokens", "8192"]


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    file = tmp_path / "lengths.csv"
    values = np.random.default_rng(0).lognormal(np.log(1200), 1.0, 48).clip(16, 8000).astype(int)
    file.write_text("length\n" + "\n".join(map(str, values)) + "\n")
    return file


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit code, standard output and errors of a command."""
    try:
        main(arguments)
    except SystemExit as end:
        code = end.code
    out, err = capsys.readouterr()
    return int(code or 0), out, err


def test_a_step_of_lengths_with_its_timeline(lengths: Path, tmp_path: Path, capsys) -> None:
    json_file, picture = tmp_path / "out" / "step.json", tmp_path / "out" / "step.png"
    json_file.parent.mkdir()
    files = ["--json", str(json_file), "--plot", str(picture)]
    code, out, _ = run([*OPTIONS, "--lengths", str(lengths), "--dp", "2", "--pp", "4", *files], capsys)
    assert code == 0
    found = json.loads(json_file.read_text())
    step, rows = found["step"], found["timeline"]
    assert out.startswith(f"{step['seconds']:.4g} s a step, predicted: {step['tokens_per_second']:,.0f} tokens")
    assert "memory (`roll-batching rehearse` counts it)" in out and "rates are estimates" in out
    assert [(row["dp_rank"], row["stage"]) for row in rows] == [(r, s) for r in range(2) for s in range(4)]
    assert max(one["end"] for row in rows for one in row["passes"]) == pytest.approx(step["seconds"])
    assert f"bubbles{step['bubble_share']:>21.1%}" in out
    assert picture.stat().st_size > 10_000


def test_sizes_per_pack_beside_the_best_single_size(lengths: Path, tmp_path: Path, capsys) -> None:
    json_file = tmp_path / "step.json"
    options = ["--dp", "8", "--dynamic-cp", "--max-cp", "4", "--max-tokens", "3000", "--json", str(json_file)]
    code, out, _ = run([*OPTIONS[:3], "--lengths", str(lengths), *options], capsys)
    found = json.loads(json_file.read_text())
    assert code == 0 and list(found["single_cp_sizes"]) == ["4"]
    ratio = found["step"]["seconds"] / found["single_cp_sizes"]["4"]["seconds"]
    assert ratio < 1 and "best single context-parallel size: 4, " in out and f"takes {ratio:.3f} of it" in out
    assert "single size 1 is impossible" in out and found["step"]["constraints"]["max_cp_size"] == 4
    assert {one["cp_size"] for row in found["timeline"] for one in row["passes"]} > {1}


def test_a_job_and_overrides(lengths: Path, tmp_path: Path, capsys) -> None:
    job = ["simulate", "--config", "configs/h100_sequence_packing.yaml", "--lengths", str(lengths)]
    seconds = {}
    for name, override in (
        ("recomputed", []),
        ("plain", ["actor_train.strategy_args.strategy_config.recompute_granularity=null"]),
        ("tp 4", ["actor_train.strategy_args.strategy_config.tensor_model_parallel_size=4"]),
    ):
        file = tmp_path / "step.json"
        code, out, _ = run([*job, *override, "--json", str(file)], capsys)
        assert code == 0 and "48 lengths are one step here" in out
        seconds[name] = json.loads(file.read_text())["step"]
    assert seconds["tp 4"]["constraints"]["tp_size"] == 4 and seconds["tp 4"]["constraints"]["dp_size"] == 2
    assert seconds["recomputed"]["seconds"] / seconds["plain"]["seconds"] == pytest.approx(4 / 3)


def test_the_part_of_a_critic_is_said_to_be_left_out(tmp_path: Path, capsys) -> None:
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("length\n" + "30\n40\n" * 6)
    for config, is_said in (("configs/ppo_demo.yaml", True), ("configs/demo_grpo.yaml", False)):
        code, out, _ = run(["simulate", "--config", config, "--lengths", str(lengths)], capsys)
        assert code == 0 and ("the critic's passes are not simulated" in out) == is_said


def test_pairs_of_a_job_stay_together(tmp_path: Path, capsys) -> None:
    file = tmp_path / "pairs.csv"
    file.write_text("length\n" + "300\n400\n" * 6)
    code, _, err = run(["simulate", "--config", "configs/dpo_demo.yaml", "--lengths", str(file)], capsys)
    assert (code, err) == (0, "")
    file.write_text("length\n300\n400\n300\n")
    code, _, err = run(["simulate", "--config", "configs/dpo_demo.yaml", "--lengths", str(file)], capsys)
    assert code == 2 and "3 lengths are no pairs" in err


def test_a_sweep_is_sorted_and_tells_why_others_are_impossible(lengths: Path, tmp_path: Path, capsys) -> None:
    file = tmp_path / "sweep.json"
    sweep = ["--sweep", "pp=1,2,3,4", "--sweep", "cp=1,2,dynamic", "--sweep", "max_tokens=4096,8192"]
    code, out, _ = run([*OPTIONS[:3], "--lengths", str(lengths), "--dp", "8", *sweep, "--json", str(file)], capsys)
    assert code == 0
    swept = json.loads(file.read_text())["sweep"]
    assert len(swept) == 24
    rates = [one["step"]["tokens_per_second"] for one in swept if "step" in one]
    assert rates == sorted(rates, reverse=True) and 0 < len(rates) < 24
    for one in swept:
        if "step" not in one:
            assert one["reason"] and f"{one['reason']}" in out
        else:
            layout = one["step"]["constraints"]
            assert layout["dp_size"] * layout["cp_size"] * layout["pp_size"] == 8
    reasons = {one["sizes"]["pp"]: one["reason"] for one in swept if one["sizes"]["cp"] == 1}
    assert "8 devices do not divide" in reasons[3]
    short = [one for one in swept if one["sizes"] == {"pp": 1, "cp": 1, "max_tokens": 4096}]
    assert "exceeds max_tokens=4096" in short[0]["reason"]
    assert "memory (`roll-batching rehearse` counts it)" in out


def test_a_sweep_simulates_what_each_layout_alone_would_be() -> None:
    lengths = np.random.default_rng(1).integers(100, 4000, 40)
    base = Scenario(
        lengths=lengths,
        constraints=PlanConstraints(dp_size=8, max_tokens=8192),
        architecture=read_architecture("qwen3-1.7b"),
    )
    for one in run_sweep(base, parse_sweep(["pp=2", "vpp=1,2", "cp=2"])):
        assert one.step is not None
        constraints = PlanConstraints(
            dp_size=2, pp_size=2, cp_size=2, vpp_size=one.changes["vpp"], max_tokens=8192
        )  # of 8 devices
        alone = Scenario(lengths=lengths, constraints=constraints, architecture=base.architecture).simulate()
        assert one.step.seconds == alone.seconds and one.step.plan == alone.plan


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "--model is missing"),
        (["--model", "qwen3-8b", "--cluster", "tpu"], "h100, a100"),
        (["--model", "qwen3-8b", "--dp", "3", "--dynamic-cp", "--max-cp", "2"], "power of two that divides dp_size=3"),
        (["--model", "qwen3-8b", "--max-cp", "2"], "--dynamic-cp only"),
        (["--model", "qwen3-8b", "--vpp", "2"], "vpp_size=2 needs pp_size"),
        (["--model", "qwen3-8b", "--pp", "8"], "36 layers do not divide"),
        (["--model", "qwen3-8b", "--max-tokens", "10"], "exceeds max_tokens=10"),
        (["--model", "qwen3-8b", "--plot", "a.txt"], "no suffix of an image format"),
        (["--model", "qwen3-8b", "--plot", "/proc/a/b.png"], "cannot be written"),
        (["--model", "qwen3-8b", "--json", "/proc/a/b.json"], "cannot be written"),
        (["--model", "qwen3-8b", "--world-size", "8"], "read with --config only"),
        (["--model", "qwen3-8b", "seed=3"], "add --config"),
        (["--model", "qwen3-8b", "--oversize", "hide"], "it must be one of error, alone, slice, truncate, drop"),
        (["--model", "qwen3-8b", "--sweep", "tokens=3"], "sizes are max_tokens, cp"),
        (["--model", "qwen3-8b", "--sweep", "pp"], "max_tokens=8192,16384"),
        (["--model", "qwen3-8b", "--sweep", "pp=1,x"], "whole numbers from 1"),
        (["--model", "qwen3-8b", "--sweep", "pp=0"], "whole numbers from 1"),
        (["--model", "qwen3-8b", "--sweep", "pp=99999999999999999999"], "whole numbers from 1"),
        (["--model", "qwen3-8b", "--sweep", "pp=²"], "whole numbers from 1"),
        (["--model", "qwen3-8b", "--sweep", "cp=big"], "or dynamic"),
        (["--model", "qwen3-8b", "--sweep", "pp=1,2", "--sweep", "pp=4"], "twice"),
        (["--model", "qwen3-8b", "--sweep", "pp=" + ",".join(map(str, range(1, 300)))], "at most 200"),
        (["--model", "qwen3-8b", "--sweep", "pp=5,7"], "no combination of the sweep is possible"),
        (["--model", "qwen3-8b", "--sweep", "pp=1", "--plot", "a.png"], "leave --sweep out"),
        (["--config", "configs/h100_sequence_packing.yaml", "--dp", "2"], "exclude each other"),
        (["--config", "configs/h100_sequence_packing.yaml", "no.such.key=1"], "no.such"),
        (["--config", "configs/demo_grpo.yaml", "--lengths", "data"], "before they are sampled"),
        (["--config", "missing.yaml"], "no such file"),
    ],
    ids=lambda value: " ".join(value)[-40:] if isinstance(value, list) else "",
)
def test_wrong_commands_are_refused(lengths: Path, options: list[str], words: str, capsys) -> None:
    given = [] if "--lengths" in options else ["--lengths", str(lengths)]
    code, out, err = run(["simulate", *given, *options], capsys)
    assert code == 2 and words in err.replace("\n", " ")
    assert "Traceback" not in out + err


@pytest.mark.bad_input
def test_lengths_that_cannot_be_read_are_refused(tmp_path: Path, capsys) -> None:
    code, _, err = run(OPTIONS, capsys)
    assert code == 2 and "--lengths is missing" in err
    for name, text, words in (
        ("a.csv", "length\nNaN\n", "NaN"),
        ("b.csv", "length\n0\n", "0"),
        ("c.csv", "", "no lengths"),
    ):
        (tmp_path / name).write_text(text)
        code, _, err = run([*OPTIONS, "--lengths", str(tmp_path / name)], capsys)
        assert code == 2 and words in err
    code, _, err = run([*OPTIONS, "--lengths", str(tmp_path / ".." / "none.csv")], capsys)
    assert code == 2 and "does not exist" in err


def test_the_picture_shows_passes_exchange_and_waiting(tmp_path: Path) -> None:
    lengths = np.random.default_rng(2).integers(500, 12_000, 40)
    shape = read_architecture("qwen3-1.7b")
    constraints = PlanConstraints(dp_size=2, cp_size=4, pp_size=4, max_tokens=16384)
    step = Scenario(lengths=lengths, constraints=constraints, architecture=shape).simulate()
    pixels = imread(draw_timeline(step, tmp_path / "a.png"))[:, :, :3].reshape(-1, 3)
    area = {}
    for name, colour in (("forward", to_rgb(FORWARD)), ("backward", to_rgb(BACKWARD)), ("exchange", to_rgb(EXCHANGE))):
        area[name] = int((np.abs(pixels - colour).max(axis=1) < 0.02).sum())
    area["waiting"] = int((np.abs(pixels - 0.92).max(axis=1) < 0.01).sum())
    drawn = sum(area.values())
    assert area["backward"] / area["forward"] == pytest.approx(2, rel=0.2)
    assert area["exchange"] / drawn == pytest.approx(step.exchange_share, rel=0.4)
    assert area["waiting"] / drawn == pytest.approx(step.bubble_share + step.end_wait_share, rel=0.25)


def test_many_ranks_are_drawn_in_part_with_the_slowest() -> None:
    lengths = np.random.default_rng(2).integers(500, 8000, 1000)
    constraints = PlanConstraints(dp_size=200, pp_size=2, max_tokens=16384)
    step = Scenario(lengths=lengths, constraints=constraints, architecture=read_architecture("qwen3-1.7b")).simulate()
    ranks = chosen_ranks(step)
    assert len(ranks) * 2 == MOST_LANES and len(set(ranks)) == len(ranks)
    assert int(step.rank_ends.argmax()) in ranks and int(step.rank_ends.argmin()) in ranks


@pytest.mark.bad_input
def test_a_streamed_job_is_refused() -> None:
    from roll_batching.jobs.config import load_config
    from roll_batching.tools.simulation.scenario import scenario_of_job

    with pytest.raises(ConfigError, match="a stream forms the steps"):
        scenario_of_job(load_config("configs/sft_demo.yaml"), np.array([30, 40]))
