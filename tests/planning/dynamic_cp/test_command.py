"""`roll-batching plan --dynamic-cp`: its figures are those of plans, its times name their source."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from roll_batching import cli
from roll_batching.cli import main
from roll_batching.commands.plan_sizes import ASSUMED
from roll_batching.planning import FlopsCost, PlanConstraints, plan_step
from roll_batching.planning.pack_times import Cluster, PackTimes
from roll_batching.planning.planner import plan_single_sizes

pytestmark = pytest.mark.planning

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}
"""The fields of Qwen3-8B's `config.json` that count."""


@pytest.fixture
def tail(tmp_path: Path) -> tuple[Path, np.ndarray]:
    lengths = np.random.default_rng(1).lognormal(np.log(1500), 1.4, 96).clip(32, 30000).astype(int)
    file = tmp_path / "lengths.csv"
    file.write_text("tokens\n" + "".join(f"{length}\n" for length in lengths))
    return file, lengths


def run(*arguments: Any) -> str:
    result = CliRunner().invoke(cli.app, ["plan", *map(str, arguments)])
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


@pytest.mark.parametrize("layout", [{}, {"pp": 2}, {"ep": 4}], ids=str)
def test_the_comparison_is_that_of_plans(tail: tuple[Path, np.ndarray], layout: dict[str, int]) -> None:
    file, lengths = tail
    options = [part for name, value in layout.items() for part in (f"--{name}", value)]
    printed = json.loads(run(file, "--dynamic-cp", "--dp", 8, "--tp", 2, "--max-tokens", 8192, "--json", *options))
    cost = FlopsCost.from_model(
        hidden_size=4096,
        ffn_hidden_size=12288,
        num_layers=36,
        num_attention_heads=32,
        num_query_groups=8,
        kv_channels=128,
        vocab_size=151936,
        tp_size=2,
    )
    shape = {"num_layers": 36, "hidden_size": 4096, "num_query_groups": 8, "kv_channels": 128}
    times = PackTimes.of_model(cost, **shape, tp_size=2, pp_size=layout.get("pp", 1))
    rules = {f"{name}_size": value for name, value in layout.items()}
    constraints = PlanConstraints(dp_size=8, tp_size=2, max_tokens=8192, max_cp_size=8, **rules)
    plan = plan_step(lengths, constraints, times=times)
    assert printed["fingerprint"] == plan.fingerprint and printed["reports"]["per pack"] == plan.report.to_dict()
    singles = {int(size): report for size, report in printed["reports"].items() if size != "per pack"}
    assert sorted(singles) == [4, 8]  # smaller packs do not hold 30,000 tokens
    best = min(singles, key=lambda size: singles[size]["predicted_seconds"])
    assert printed["best_size"] == best == plan.report.fixed_cp_size
    assert singles[best]["predicted_seconds"] == plan.report.fixed_seconds >= plan.report.predicted_seconds
    for size, one in plan_single_sizes(lengths, constraints, times=times).items():
        assert set(one.cp_sizes[~one.fillers].tolist()) == {size}
        assert singles[size] == one.report.to_dict() and one.report.real_tokens == lengths.sum()
    assert sum(printed["packs_by_size"].values()) == int((~plan.fillers).sum())


def test_the_source_of_times_is_said(tail: tuple[Path, np.ndarray], tmp_path: Path) -> None:
    file = tail[0]
    options = (file, "--dynamic-cp", "--dp", 8, "--max-tokens", 8192)
    text = run(*options)
    assert "times are predicted, not measured: the shape of Qwen3-8B (36 layers, hidden size 4,096), which is" in text
    assert "h100, whose rates are estimates" in text and "sizes that do not hold every sequence: 1, 2" in text
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(QWEN3))
    given = (*options, "--model", tmp_path / "model")
    text = run(*given, "--cluster", "matmul_rate=3e14", "--cluster", "devices_per_node=4")
    assert (
        f"the shape of {tmp_path / 'model'} (36 layers, hidden size 4,096); " in text
        and ", whose rates are estimates" in text
    )
    printed = json.loads(run(*given, "--cluster", "matmul_rate=3e14", "--json"))
    assumed = json.loads(run(*options, "--cluster", "matmul_rate=3e14", "--json"))
    assert printed["reports"] == assumed["reports"] and printed["cluster"]["matmul_rate"] == 3e14
    assert (printed["model_is_assumed"], assumed["model_is_assumed"]) == (False, True)
    faster = json.loads(run(*options, "--json"))
    assert faster["reports"]["per pack"]["predicted_seconds"] < assumed["reports"]["per pack"]["predicted_seconds"]
    assert faster["cluster"]["attention_rate"] == Cluster().attention_rate and ASSUMED.num_layers == 36


@pytest.mark.parametrize("ranks", [8, 64])
def test_plans_with_blocks_are_drawn(tail: tuple[Path, np.ndarray], tmp_path: Path, ranks: int) -> None:
    """Frames of blocks and their sizes, or a map of sizes, are in the text of an SVG."""
    picture = tmp_path / "plan.svg"
    shown = run(tail[0], "--dynamic-cp", "--dp", ranks, "--max-tokens", 8192, "--plot", picture)
    text = picture.read_text()
    assert f"picture: {picture}" in shown
    assert ("<!-- CP 4 -->" if ranks == 8 else "<!-- log2 of the context-parallel size -->") in text
    assert "with the best single size" in text


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--dynamic-cp", "--max-cp", "3"], "max_cp_size=3 must be a power of two"),
        (["--dynamic-cp", "--max-cp", "16"], "max_cp_size=16 must be a power of two that divides dp_size=8"),
        (["--dynamic-cp", "--max-cp", "1"], "has only the size 1 among 8 ranks"),
        (["--dynamic-cp", "--dp", "7"], "has only the size 1 among 7 ranks"),
        (["--dynamic-cp", "--model", "../nothing"], "is neither a model directory here"),
        (["--dynamic-cp", "--cluster", "speed=1"], "known are matmul_rate"),
        (["--dynamic-cp", "--cluster", "matmul_rate"], "write KEY=VALUE"),
        (["--dynamic-cp", "--cluster", "matmul_rate=fast"], "'fast' is not a number"),
        (["--dynamic-cp", "--cluster", "matmul_rate=nan"], "finite number"),
        (["--dynamic-cp", "--cluster", "matmul_rate=0"], "finite number of FLOP/s, at least 1e+09"),
        (["--dynamic-cp", "--cluster", "attention_tile=1.5"], "is 1.5; it must be an integer"),
        (["--dynamic-cp", "--cluster", "node_latency=25"], "did you mean 2.5e-05 (25 microseconds)?"),
        (["--dynamic-cp", "--cp", "2"], "needs cp_size=1"),
        (["--dynamic-cp", "--mode", "padded"], "needs mode='packed'"),
        (["--dynamic-cp", "--algorithm", "none"], "needs algorithm='load_balance'"),
        (["--dynamic-cp", "--oversize", "alone"], 'oversize="alone" is not available'),
        (["--dynamic-cp", "--compare"], "leave one of them out"),
        (["--dynamic-cp", "--max-tokens", "100"], "exceeds max_tokens=100, max_cp_size=8"),
        (["--max-cp", "4"], "are read with --dynamic-cp only"),
        (["--cluster", "matmul_rate=1e14"], "are read with --dynamic-cp only"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_that_cannot_be_end_with_2(
    tail: tuple[Path, np.ndarray], capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", str(tail[0]), *options])
    said = capsys.readouterr()
    assert ended.value.code == 2 and not said.out
    assert said.err.startswith("error: ") and words in said.err
