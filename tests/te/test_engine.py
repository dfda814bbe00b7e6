"""TransformerEngine's layers on the real package: what is built, under which names, and what is written and read.

Nothing is computed: the kernels need a GPU.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.layouts import Layout
from tests.support.ranks import meet, part, run_ranks
from tests.te.engine import needs_engine

pytestmark = [pytest.mark.te, needs_engine]

HERE = "tests.te.test_engine:"
ENGINE = {"transformer_impl": "transformer_engine"}


def _written(folder: Path, name: str, model: Any = None) -> Path:
    import torch

    from tests.huggingface import tiny

    tiny.write_model(folder / name, name, torch.bfloat16, model=model, max_shard_size="20KB")
    tiny.write_tokenizer(folder / name)
    return folder / name


def read_and_written(payload: list[tuple[str, Layout, str]]) -> list[dict[str, Any]]:
    """Of each model directory, built in a layout, read and exported: its parameters and what its layers are."""
    from roll_batching.modeling.head import gpt_of, is_deferred
    from tests.te.engine import strategy_of

    found = []
    for number, (directory, layout, export) in enumerate(payload):
        meet(number)
        strategy = strategy_of(directory, layout.megatron() | ENGINE)
        gpt = gpt_of(strategy.chunks[0])
        found.append(
            {
                "names": [name for name, _ in gpt.named_parameters()],
                "kinds": {name: type(module).__name__ for name, module in gpt.named_modules()},
                "norm": type(gpt.decoder.final_layernorm).__module__ if gpt.post_process else None,
                "deferred": is_deferred(gpt) if gpt.post_process else None,
                "rope": gpt.position_embedding_type,
                "attention": strategy.state.attention.name,
            }
        )
        strategy.export(export)
        del strategy, gpt
        part()
    return found


def computed(payload: list[tuple[str, Layout]]) -> list[dict[str, Any]]:
    """Of each model directory in a layout, with torch's products in fp32: log-probs, and losses of steps of AdamW."""
    from tests.huggingface import ranks
    from tests.te.engine import strategy_of
    from tests.te.plain_kernels import plain_kernels

    found = []
    for number, (directory, layout) in enumerate(payload):
        meet(number)
        with plain_kernels():
            keys = layout.megatron() | ENGINE | {"attention_backend": "dense"}
            strategy = strategy_of(directory, keys, dtype="fp32")
            rows = ranks.log_probs(strategy)
            losses = ranks.sft_losses(strategy, 3, 1e-3)
        found.append({"dp_rank": strategy.layout.dp_rank, "log_probs": rows, "losses": losses})
        del strategy
        part()
    return found


@pytest.mark.parametrize(
    ("names", "layouts"),
    [
        (["llama2", "qwen2", "qwen3"], [Layout(tp=2, sp=True, pp=2), Layout(tp=2, dp=2, distopt=True)]),
        (["qwen3_moe"], [Layout(tp=2, sp=True, dp=2, ep=2, moe=True)]),
    ],
    ids=["dense", "experts"],
)
def test_what_was_read_is_written_to_the_bit(tmp_path: Path, names: list[str], layouts: list[Layout]) -> None:
    from tests.huggingface.test_export import check_equal

    cases = [
        (str(_written(tmp_path, name) if not n else tmp_path / name), layout, str(tmp_path / f"{name}-{n}"))
        for name in names
        for n, layout in enumerate(layouts)
    ]
    everyone = run_ranks(4, HERE + "read_and_written", cases, timeout=600)
    for number, (source, _, export) in enumerate(cases):
        check_equal(Path(export), Path(source))
        first, last = everyone[0][number], everyone[-1][number]
        layer = "decoder.layers.0."
        assert f"{layer}self_attention.linear_qkv.layer_norm_weight" in first["names"]
        assert not any("input_layernorm" in name for name in first["names"])
        kinds = first["kinds"]
        assert kinds[f"{layer}self_attention.linear_qkv"] == "TELayerNormColumnParallelLinear"
        assert kinds[f"{layer}self_attention.core_attention"] == "TEDotProductAttention"
        assert (first["rope"], first["attention"]) == ("rope", "transformer_engine")
        assert last["deferred"] and "transformer_engine" in last["norm"]
        if "moe" in source:
            assert f"{layer}mlp.experts.linear_fc1.weight1" in first["names"]
        else:
            assert f"{layer}mlp.linear_fc1.layer_norm_weight" in first["names"]


@pytest.mark.parametrize(
    ("names", "layout"),
    [
        (["deepseek_v3", "deepseek_v3_small", "qwen3_next", "minimax_m2"], Layout(tp=2, sp=True, dp=2, ep=2, moe=True)),
        (["qwen3_5"], Layout(tp=2, sp=True, pp=2)),
    ],
    ids=["experts", "pipeline"],
)
def test_latent_attention_and_delta_nets_are_written_to_the_bit(
    tmp_path: Path, names: list[str], layout: Layout
) -> None:
    from tests.huggingface.test_export import check_equal

    cases = [(str(_written(tmp_path, name)), layout, str(tmp_path / f"{name}-written")) for name in names]
    everyone = run_ranks(4, HERE + "read_and_written", cases, timeout=600)
    layer = "decoder.layers.0.self_attention"
    for (source, _, export), found in zip(cases, everyone[0], strict=True):
        check_equal(Path(export), Path(source))
        kinds = found["kinds"]
        if "deepseek" in source:
            assert kinds[layer] == "PackedLatentAttention"
            linear = ("linear_kv_down_proj", "linear_kv_up_proj", "linear_proj")
        elif "minimax" in source:
            assert kinds[f"{layer}.q_layernorm"] == kinds[f"{layer}.k_layernorm"] == "AllHeadsRMSNorm"
            linear = ("linear_qkv", "linear_proj")
        else:
            assert kinds[layer] == "PackedDeltaNet"
            linear = ("in_proj", "out_proj")
        assert all(kinds[f"{layer}.{name}"].startswith("TE") for name in linear)
        assert found["attention"] == ("transformer_engine" if "minimax" in source else "dense")  # by `auto`


ONE, TENSOR, EXPERT = Layout(moe=True), Layout(tp=2, sp=True, moe=True), Layout(dp=2, ep=2, moe=True)


@pytest.mark.parametrize("layout", [ONE, TENSOR, EXPERT], ids=str)
def test_with_plain_products_they_compute_what_transformers_computes(
    tmp_path: Path, layout: Layout, report: Any
) -> None:
    """Log-probs and three steps of AdamW: the structure of TransformerEngine's layers, not its kernels."""
    import torch

    from tests.huggingface import tiny

    names = ["deepseek_v3", "qwen3_next", "minimax_m2"]
    models = [tiny.write_model(tmp_path / name, name) for name in names]
    payload = [(str(tmp_path / name), layout) for name in names]
    everyone = run_ranks(layout.ranks, HERE + "computed", payload, timeout=600)
    for number, (name, model) in enumerate(zip(names, models, strict=True)):
        with torch.no_grad():
            expected = tiny.log_probs(model)
        losses = tiny.sft_losses(model, 3, 1e-3)
        for answers in everyone:
            found = answers[number]
            pairs = zip(found["log_probs"], expected[found["dp_rank"] :: layout.dp], strict=True)
            gap = max(float((row - right).abs().max()) for row, right in pairs if len(row))
            steps = max(abs(a - b) for a, b in zip(found["losses"], losses, strict=True))
            report(f"{name} {layout!s}: log-probs {gap:.1e}, losses {steps:.1e}")
            assert gap < 1e-5 and steps < 1e-5


def checkpoints(payload: tuple[str, str]) -> dict[str, Any]:
    """Saved with TransformerEngine's layers and loaded into local ones, and the other way round."""
    import torch

    from roll_batching.modeling.head import gpt_of
    from tests.support.models import global_name
    from tests.te.engine import strategy_of

    directory, folder = payload
    strategies = {
        kind: strategy_of(directory, {"tensor_model_parallel_size": 2, "transformer_impl": kind})
        for kind in ("transformer_engine", "local")
    }
    models = [gpt_of(strategy.chunks[0]) for strategy in strategies.values()]
    names = [{global_name(gpt, name) for name, _ in gpt.named_parameters()} for gpt in models]
    assert names[0] == names[1]  # what scripts/gpu_checks.py compares by

    def weights(strategy: Any) -> list[torch.Tensor]:
        return sorted(
            (p.detach().clone() for chunk in strategy.chunks for p in chunk.parameters()),
            key=lambda p: (p.numel(), p.double().sum().item()),
        )

    found: dict[str, Any] = {}
    for saver, loader in (("transformer_engine", "local"), ("local", "transformer_engine")):
        with torch.no_grad():
            for parameter in (p for chunk in strategies[saver].chunks for p in chunk.parameters()):
                parameter.mul_(1.5)
        strategies[saver].optimizer.reload_model_params()
        strategies[saver].save(f"{folder}/{saver}")
        before = weights(strategies[loader])
        strategies[loader].load(f"{folder}/{saver}")
        after, saved = weights(strategies[loader]), weights(strategies[saver])
        found[loader] = (
            all(torch.equal(a, b) for a, b in zip(after, saved, strict=True)),
            all(torch.equal(a, b) for a, b in zip(after, before, strict=True)),
        )
    return found


def test_checkpoints_go_between_the_layers_of_either_kind(tmp_path: Path) -> None:
    source = _written(tmp_path, "qwen3")
    for found in run_ranks(2, HERE + "checkpoints", (str(source), str(tmp_path)), timeout=300):
        assert found == {"local": (True, False), "transformer_engine": (True, False)}
    files = {file.name for file in (tmp_path / "transformer_engine").rglob("*") if file.is_file()}
    assert not any("extra_state" in name for name in files), files
    assert json.loads((tmp_path / "local" / "strategy.json").read_text())["optimizer"] is not None


def refused(directory: str) -> list[str]:
    """What a strategy over TransformerEngine's layers says on the CPU, as it is."""
    from roll_batching.errors import LayoutError, RankError
    from roll_batching.strategy import MegatronInferStrategy, MegatronTrainStrategy
    from tests.te.engine import role, strategy_of

    said = []
    for kind in (MegatronTrainStrategy, MegatronInferStrategy):
        try:
            kind(role(directory, ENGINE)).initialize()
        except (LayoutError, RankError) as error:
            said.append(str(error))
    built = strategy_of(directory, ENGINE)
    try:
        MegatronTrainStrategy.from_parts(built.chunks, built.optimizer, built.batching)
    except (LayoutError, RankError) as error:
        said.append(str(error))
    return said


def test_on_the_cpu_it_is_refused_by_name_whichever_way_a_strategy_is_made(tmp_path: Path) -> None:
    said = run_ranks(1, HERE + "refused", str(_written(tmp_path, "llama2")), timeout=300)[0]
    assert len(said) == 3
    for text in said:
        assert "TransformerEngine's layers compute on CUDA, not on cpu: set transformer_impl: local" in text
    assert "transformer_engine runs on cuda" in said[0]


def what_a_gpu_would_get(_: None) -> dict[str, Any]:
    """The kernels chosen for CUDA, a TransformerConfig with them, and what attention is called with."""
    import inspect

    import torch
    from megatron.core.extensions.transformer_engine import TEDotProductAttention
    from megatron.core.packed_seq_params import PackedSeqParams
    from transformer_engine.pytorch import DotProductAttention

    from roll_batching.distributed.parallel_layout import make_layout, start_processes
    from roll_batching.modeling.kernels import choose_kernels
    from roll_batching.modeling.transformer_config import transformer_config
    from roll_batching.planning import ParallelDims
    from roll_batching.settings import ArchitectureConfig, MegatronConfig
    from tests.support.models import ARCHITECTURE
    from tests.te.engine import as_if_on_an_h100

    layout = make_layout(ParallelDims(), start_processes())
    architecture = ArchitectureConfig(**ARCHITECTURE, moe={"num_experts": 4})
    strategy = MegatronConfig(transformer_impl="transformer_engine")
    with as_if_on_an_h100():
        kernels = choose_kernels(strategy, architecture, torch.device("cuda"))
        config = transformer_config(architecture, strategy, layout, torch.bfloat16, kernels=kernels)
    options = kernels.options
    build = {"config": config, "layer_number": 1, "attn_mask_type": None, "attention_type": "self"}
    with as_if_on_an_h100():
        from megatron.core.transformer.enums import AttnMaskType

        core = kernels.attention.build_core(None, **build | {"attn_mask_type": AttnMaskType.causal})
    assert isinstance(core, TEDotProductAttention)
    taken = set(inspect.signature(DotProductAttention.forward).parameters)
    given = core.kept_packed_seq_params - {"cp_group", "local_cp_size"}
    assert given <= {field for field in PackedSeqParams.__dataclass_fields__}
    from roll_batching.modeling.builder import optimizer_config
    from roll_batching.settings import TrainingArgs

    state = {
        "main_grads_dtype": "bf16",
        "main_params_dtype": "fp16",
        "exp_avg_dtype": "fp8",
        "exp_avg_sq_dtype": "bf16",
    }
    aware = MegatronConfig(use_distributed_optimizer=True, use_precision_aware_optimizer=True, **state)
    optimizer = optimizer_config(TrainingArgs(), aware, torch.bfloat16, torch.device("cuda"))
    return {
        "state": [str(getattr(optimizer, name)).removeprefix("torch.") for name in state],
        "on": sorted(name for name, on in options.items() if on),
        "kept": {name: getattr(config, name) for name in options},
        "not taken": sorted(given - taken),
        "notice": kernels.notice,
    }


def test_its_kernels_are_on_where_there_is_a_gpu() -> None:
    found = run_ranks(1, HERE + "what_a_gpu_would_get", timeout=300)[0]
    assert found["on"] == [
        "apply_rope_fusion",
        "bias_activation_fusion",
        "moe_grouped_gemm",
        "moe_permute_fusion",
        "moe_router_fusion",
    ]
    assert all(found["kept"][name] for name in found["on"])  # Megatron's own checks let them pass
    assert found["not taken"] == []
    assert found["state"] == ["bfloat16", "float16", "uint8", "bfloat16"]
    assert "attention: transformer_engine (part of its layers)" in found["notice"]
    assert (
        "not fused: gradient_accumulation_fusion (APEX's fused_weight_gradient_mlp_cuda is not installed)"
        in (found["notice"])
    )
