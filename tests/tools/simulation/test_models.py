"""Shapes of models and clusters: the cost of a job's own model, and refused names and values."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from roll_batching.errors import ConfigError, PlanError
from roll_batching.jobs.config import load_config
from roll_batching.planning import FlopsCost, ParallelDims
from roll_batching.planning.pack_times import Cluster
from roll_batching.settings import ArchitectureConfig
from roll_batching.settings.model_cost import architecture_cost
from roll_batching.tools.simulation import CLUSTERS, MODELS, read_architecture, read_cluster
from roll_batching.tools.simulation.models import architecture_times, check_layout
from tests.huggingface.published import PUBLISHED
from tests.support.models import ARCHITECTURE
from tests.support.ranks import run_ranks

MIXTURE = {**ARCHITECTURE, "moe": {"num_experts": 4, "router_topk": 2, "ffn_hidden_size": 24, "layer_freq": 2}}


def planner_of_strategy(architecture: dict) -> tuple[FlopsCost, object]:
    from roll_batching.modeling.cost import model_pack_times
    from roll_batching.modeling.head import gpt_of
    from roll_batching.strategy import MegatronTrainStrategy
    from tests.support.models import worker_config

    strategy = MegatronTrainStrategy(worker_config("packed", 64, architecture=architecture))
    strategy.initialize()
    config = gpt_of(strategy.chunks[0]).config
    times = model_pack_times(config, architecture["vocab_size"], strategy.layout, Cluster())
    return strategy.planner.cost, times


@pytest.mark.parametrize("architecture", [ARCHITECTURE, MIXTURE], ids=["dense", "mixture"])
def test_cost_and_times_are_those_of_the_jobs_own_model(architecture) -> None:
    shape = ArchitectureConfig.model_validate(architecture)
    ((cost, times),) = run_ranks(1, "tests.tools.simulation.test_models:planner_of_strategy", architecture)
    assert architecture_cost(shape, tp_size=1, cp_size=1) == cost
    assert architecture_times(shape, ParallelDims(), Cluster()) == times


def test_shapes_from_a_name_a_directory_and_a_file(tmp_path: Path) -> None:
    for name in MODELS:
        assert read_architecture(name).hidden_size == MODELS[name]["hidden_size"]
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["Qwen2.5-7B"]))
    assert read_architecture(str(tmp_path)).num_layers == 28
    file = tmp_path / "shape.yaml"
    file.write_text("vocab_size: 100\nhidden_size: 64\nnum_layers: 4\nnum_attention_heads: 4\n")
    assert read_architecture(str(file)).ffn_width == 256
    job = Path(__file__).parents[3] / "configs" / "dpo_demo.yaml"
    assert read_architecture(str(job)) == load_config(job).actor_train.model_args.architecture


@pytest.mark.bad_input
def test_unknown_shapes_are_refused(tmp_path: Path) -> None:
    for name in ("qwen9", str(tmp_path / "missing"), "../../nowhere/at/all"):
        with pytest.raises(ConfigError, match="qwen3-8b"):
            read_architecture(name)
    file = tmp_path / "shape.yaml"
    for text, words in (
        ("hidden_size: 64", "num_layers"),
        ("vocab_size: 9\nhidden_size: -1\nnum_layers: 4\nnum_attention_heads: 4", "hidden_size"),
        ("vocab_size: 9\nhidden_size: 64\nnum_layers: 4\nnum_attention_heads: 4\nwidth: 3", "width"),
        ("- 1", "keys and values"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=words):
            read_architecture(str(file))
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(ConfigError, match="mamba"):
        read_architecture(str(tmp_path))


def test_clusters_from_a_name_and_a_file(tmp_path: Path) -> None:
    assert read_cluster("h100") == CLUSTERS["h100"] == Cluster()
    file = tmp_path / "mine.yaml"
    for text in ("matmul_rate: 4e14\ndevices_per_node: 4\n", "cluster:\n  matmul_rate: 4e14\n  devices_per_node: 4\n"):
        file.write_text(text)
        assert read_cluster(str(file)) == Cluster(matmul_rate=4e14, devices_per_node=4)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("matmul_rat: 4e14", "did you mean 'matmul_rate'"),
        ("speed: 4e14", "known are matmul_rate"),
        ("matmul_rate: 400", "did you mean 4e.14 .400 TFLOP/s"),
        ("matmul_rate: .nan", "number of FLOP/s"),
        ("matmul_rate: .inf", "number of FLOP/s"),
        ("matmul_rate: true", "number of FLOP/s"),
        ("matmul_rate: fast", "number of FLOP/s"),
        ("matmul_rate: [4e14]", "number of FLOP/s"),
        ("network_bandwidth: 400", "did you mean 4e.11 .400 GB/s"),
        ("node_latency: 25", "did you mean 2.5e-05 .25 microseconds"),
        ("node_latency: -1", "seconds, at least 0 and at most 0.004"),
        ("devices_per_node: 0", "an integer, at least 1"),
        ("devices_per_node: 2.5", "an integer, at least 1"),
        ("attention_tile: 100000000000", "an integer, at least 1 and at most 65536"),
        ("cluster: 3", "names no rates"),
        ("", "names no rates"),
        ("- 3", "keys and values"),
        ("matmul_rate: 4e14\nmatmul_rate: 5e14", "2 times"),
    ],
)
def test_absurd_clusters_are_refused(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_cluster(str(file))


@pytest.mark.bad_input
def test_unknown_clusters_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="h100, a100, or a YAML file"):
        read_cluster("tpu")
    with pytest.raises(ConfigError, match="no such file"):
        read_cluster(str(tmp_path / ".." / "missing.yaml"))


def test_layouts_that_do_not_divide_the_model() -> None:
    shape = read_architecture("qwen3-8b")
    check_layout(shape, ParallelDims(pp_size=4, vpp_size=3, tp_size=8))
    for sizes, words in (
        ({"pp_size": 4, "vpp_size": 2}, "36 layers do not divide"),
        ({"tp_size": 3}, "32 attention heads do not divide"),
        ({"dp_size": 2, "ep_size": 2}, "no experts"),
    ):
        with pytest.raises(PlanError, match=words):
            check_layout(shape, ParallelDims(**sizes))


def test_multi_latent_attention_costs_what_the_planner_of_a_job_counts() -> None:
    latent = {"kv_lora_rank": 16, "qk_head_dim": 8, "qk_pos_emb_head_dim": 8, "v_head_dim": 8}
    plain = {"hidden_size": 32, "num_layers": 2, "num_attention_heads": 4, "ffn_hidden_size": 64, "vocab_size": 64}
    shape = ArchitectureConfig.model_validate(plain | {"multi_latent_attention": latent})
    times = architecture_times(shape, ParallelDims(), Cluster())
    cost = architecture_cost(shape)
    assert (times.linear, times.quadratic) == (cost.linear, cost.quadratic)
    assert times.quadratic == 3 * 2 * 4 * (16 + 8), "layers x heads x channels of keys and values"
