"""Muon: steps of a strategy are those of Megatron's own loop, checkpoints go on, and what cannot work is refused.

Without NVIDIA's package Emerging-Optimizers the tests that train are skipped.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.layouts import Layout
from tests.support.ranks import meet, part, run_ranks

HERE = "tests.strategy.test_muon:"
IS_OLD = sys.version_info < (3, 12)  # the project's pairs: Python 3.11 with Megatron-Core 0.16, 3.12 with 0.19
MUON: dict[str, Any] = {"optimizer": "muon", "learning_rate": 1e-2, "weight_decay": 0.1, "max_grad_norm": 0.5}


def _absent() -> str | None:
    """Why Muon cannot train here; None if it can."""
    from roll_batching.modeling.requirements import optimizer_problems
    from roll_batching.settings import MegatronConfig, TrainingArgs

    problems = optimizer_problems(TrainingArgs(**MUON), MegatronConfig(), torch.device("cpu"), torch.float32)
    return problems[0] if problems else None


needs_muon = pytest.mark.skipif(_absent() is not None, reason=str(_absent()))

# ---- steps


LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "tp2 duplicated": {"tp": 2, "muon": {"muon_tp_mode": "duplicated"}},
    "pp2": {"pp": 2},
    "cp2": {"cp": 2},
    "dp2": {},
    "ep2": {"ep": 2},
    # In fp32 the layer-wise optimizer of Megatron-Core 0.19 fails.
    **({"dp2 layer-wise": {"shards": True}, "ep2 layer-wise": {"ep": 2, "shards": True}} if IS_OLD else {}),
}
FEW = ("tp2", "dp2 layer-wise" if IS_OLD else "dp2")
EXPERTS = {"num_experts": 4, "router_topk": 2, "ffn_hidden_size": 24}


def _settings(sizes: dict[str, Any], dtype: str = "fp32", **training: Any) -> Any:
    from tests.support.models import ARCHITECTURE, worker_config

    megatron = {
        "tensor_model_parallel_size": sizes.get("tp", 1),
        "pipeline_model_parallel_size": sizes.get("pp", 1),
        "context_parallel_size": sizes.get("cp", 1),
        "expert_model_parallel_size": sizes.get("ep", 1),
        "use_distributed_optimizer": sizes.get("shards", False),
    }
    architecture = {**ARCHITECTURE, "vocab_size": 62, **({"moe": EXPERTS} if "ep" in sizes else {})}
    training = {**MUON, **sizes.get("muon", {}), **training}
    return worker_config("packed", 128, architecture=architecture, megatron=megatron, training=training, dtype=dtype)


def _rows(step: int) -> torch.Tensor:
    return torch.randint(0, 62, (8, 16), generator=torch.Generator().manual_seed(step))


def _samples(ids: list[int], step: int) -> Any:
    from roll_batching.samples import SampleBatch

    fields = {"input_ids": list(_rows(step)[ids]), "response_mask": [torch.ones(16, dtype=torch.bool)] * len(ids)}
    return SampleBatch.from_lists(fields, {"input_ids": "token", "response_mask": "token"}, ids=ids)


def _train(config: Any, count: int = 3) -> tuple[Any, list[float]]:
    """(A strategy after `count` steps on `_rows`, its gradient norms)."""
    from roll_batching.losses import SFTLoss
    from roll_batching.samples import distribute, gather_lengths
    from roll_batching.strategy import MegatronTrainStrategy
    from tests.support.models import fill

    strategy = MegatronTrainStrategy(config)
    strategy.initialize()
    fill(strategy.chunks, 62, strategy.layout.tp_rank, strategy.layout.tp_size)
    strategy.optimizer.reload_model_params()
    norms = []
    for step in range(count):
        local = _samples(list(range(strategy.layout.dp_rank, 8, strategy.layout.dp_size)), step)
        plan = strategy.plan(gather_lengths(local))
        norms.append(strategy.train_step(distribute(local, plan), plan, SFTLoss()).grad_norm)
    return strategy, norms


def _weights(chunks: Any) -> dict[str, torch.Tensor]:
    from roll_batching.modeling.head import gpt_of
    from tests.support.models import global_name

    gpts = [gpt_of(chunk) for chunk in chunks]
    return {global_name(gpt, name): p.detach().clone() for gpt in gpts for name, p in gpt.named_parameters()}


def _megatrons_optimizer(chunks: list[Any], config: Any, *, bf16: bool = False, **options: Any) -> Any:
    """Muon as Megatron's training builds it."""
    from megatron.core import optimizer

    args = config.training_args
    options |= {"muon_tp_mode": args.muon_tp_mode, "muon_fp32_matmul_prec": args.muon_fp32_matmul_prec}
    shards = config.strategy_args.strategy_config.use_distributed_optimizer
    if not IS_OLD:
        options["use_layer_wise_distributed_optimizer"] = shards
    settings = optimizer.OptimizerConfig(
        optimizer="muon", lr=1e-2, weight_decay=0.1, clip_grad=0.5, bf16=bf16, **options,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
    )  # fmt: skip
    if not IS_OLD:
        return optimizer.get_megatron_optimizer(settings, chunks)
    from megatron.core.optimizer.muon import get_megatron_muon_optimizer

    return get_megatron_muon_optimizer(settings, chunks, layer_wise_distributed_optimizer=shards)


def _schedule(optimizer: Any) -> Any:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    return OptimizerParamScheduler(
        optimizer, 0.0, 1e-2, 0.0, 0, 10, "constant", start_wd=0.1, end_wd=0.1, wd_incr_steps=0,
        wd_incr_style="constant",
    )  # fmt: skip


def _megatrons_loop(sizes: dict[str, Any], config: Any) -> tuple[list[Any], list[float]]:
    """(Chunks after three steps of Megatron's own loop, gradient norms): plain Megatron code, two rows at a time."""
    from megatron.core import parallel_state as mpu
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from tests.support.own_model import build

    options: dict[str, Any] = {}
    if "ep" in sizes:
        options = {
            "num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 24, "moe_aux_loss_coeff": 0.0,
            "expert_model_parallel_size": 2, "moe_router_load_balancing_type": "none",
        }  # fmt: skip
    chunks, _ = build("rows", vocab_size=62, **options)
    optimizer = _megatrons_optimizer(chunks, config)
    scheduler = _schedule(optimizer)
    cp, cp_rank = mpu.get_context_parallel_world_size(), mpu.get_context_parallel_rank()
    order = torch.arange(16).chunk(2 * cp)
    mine = torch.cat([order[cp_rank], order[2 * cp - 1 - cp_rank]]) if cp > 1 else torch.arange(16)

    def forward(rows: Any, model: Any) -> Any:
        ids = next(rows)
        labels, counted = ids.roll(-1, 1), (torch.arange(16) < 15).float().expand_as(ids)
        losses = model(ids[:, mine], mine.expand(len(ids), -1), None, labels=labels[:, mine])
        # The schedule multiplies by the context-parallel size, since gradients are averaged over those ranks too.
        return losses, lambda out: ((out * counted[:, mine]).sum() / counted.sum(), {})

    norms = []
    for step in range(3):
        rows = _rows(step)[mpu.get_data_parallel_rank() :: mpu.get_data_parallel_world_size()]
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward, data_iterator=iter(rows.split(2)), model=chunks, seq_length=16,
            num_microbatches=len(rows) // 2, micro_batch_size=2, forward_only=False,
        )  # fmt: skip
        norms.append(float(optimizer.step()[1]))
        scheduler.step(1)
    return chunks, norms


def compared_with_megatron(layouts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """By layout: largest difference of weights over the largest change of any, the norms, and of a control."""
    found = {}
    for name, sizes in layouts.items():
        meet(name)
        ours, norms = _train(config := _settings(sizes, muon_fp32_matmul_prec="highest"))
        weights = _weights(ours.chunks)
        chunks, theirs = _megatrons_loop(sizes, config)
        expected = _weights(chunks)
        assert weights.keys() == expected.keys() and len(weights) > 5
        worst = max(float((weights[key] - expected[key]).abs().max()) for key in weights)
        found[name] = (worst, norms, theirs)
        part()
    return found


@needs_muon
@pytest.mark.parametrize(
    ("ranks", "names"),
    [(1, ["one rank"]), (2, FEW), pytest.param(2, sorted(LAYOUTS.keys() - FEW), marks=pytest.mark.slow)],
)
def test_steps_are_those_of_megatrons_own_loop(ranks: int, names: list[str], report: Any) -> None:
    """The model of the loop has another attention, and rows instead of packs: gradients differ by rounding.

    Newton-Schulz iterations amplify it up to 3.4^5 times, in directions that have almost no gradient.
    """
    for found in run_ranks(ranks, HERE + "compared_with_megatron", {name: LAYOUTS.get(name, {}) for name in names}):
        for name, (worst, norms, expected) in found.items():
            report(f"muon, {name}: weights differ by {worst:.1e} after three steps of about 1e-2")
            assert norms == pytest.approx(expected, rel=1e-5), name
            assert worst < 1e-5, name


def controls(changes: list[dict[str, Any]]) -> list[float]:
    """Largest difference of weights after three steps with other settings, for each of `changes`."""
    found = []
    meet("plain")
    plain = _weights(_train(_settings({}))[0].chunks)
    part()
    for number, change in enumerate(changes):
        meet(number)
        other = _weights(_train(_settings({}, **change))[0].chunks)
        found.append(max(float((other[key] - plain[key]).abs().max()) for key in plain))
        part()
    return found


@needs_muon
def test_every_key_reaches_megatron() -> None:
    changes: list[dict[str, Any]] = [
        {"muon_momentum": 0.5}, {"muon_nesterov": True}, {"muon_split_qkv": False}, {"muon_num_ns_steps": 10},
        {"muon_scale_mode": "shape_scaling"}, {"muon_extra_scale_factor": 0.2}, {"muon_fp32_matmul_prec": "highest"},
        {"adam_beta1": 0.5}, {"adam_beta2": 0.5}, {"adam_epsilon": 1e-3},
    ]  # fmt: skip
    changes += [] if IS_OLD else [{"muon_coefficient_type": "aol"}]
    ((*gaps,),) = run_ranks(1, HERE + "controls", changes)
    assert min(gaps) > 1e-4, list(zip(changes, gaps, strict=True))


# ---- the layer-wise distributed optimizer


def layer_wise(folder: str) -> dict[str, Any]:
    """On two ranks in bf16: our optimizer, and in `from_parts` Megatron's own, whose checkpoint goes on."""
    from roll_batching.losses import SFTLoss
    from roll_batching.samples import distribute, gather_lengths
    from roll_batching.strategy import MegatronTrainStrategy

    meet("layer-wise")
    config = _settings({"shards": True}, "bf16")
    ours, norms = _train(config)
    mine = sum(t.numel() for part in ours.optimizer.chained_optimizers for s in part.optimizer.state.values()
               for t in s.values() if t.numel() > 1)  # fmt: skip
    found: dict[str, Any] = {"kind": type(ours.optimizer).__name__, "norms": norms, "states": mine}
    theirs, _ = _train(config, 0)
    optimizer = _megatrons_optimizer(theirs.chunks, config, bf16=True)
    existing = MegatronTrainStrategy.from_parts(
        theirs.chunks, optimizer, config.batching(), vocab_size=62, scheduler=_schedule(optimizer),
        scheduler_unit="steps",
    )  # fmt: skip

    def step(number: int) -> float:
        ids = list(range(existing.layout.dp_rank, 8, 2))
        local = _samples(ids, number)
        plan = existing.plan(gather_lengths(local))
        return existing.train_step(distribute(local, plan), plan, SFTLoss()).grad_norm

    found["norms of theirs"] = [step(number) for number in range(3)]
    weights = _weights(ours.chunks)
    found["differing"] = [k for k, v in _weights(theirs.chunks).items() if not torch.equal(v, weights[k])]
    existing.save(f"{folder}/existing")
    expected = step(3), _weights(theirs.chunks)
    existing.load(f"{folder}/existing")
    found["goes on"] = step(3) == expected[0] and all(
        torch.equal(value, expected[1][key]) for key, value in _weights(theirs.chunks).items()
    )
    part()
    return found


@needs_muon
def test_the_layer_wise_optimizer_is_megatrons_ours_and_a_callers(tmp_path: Path) -> None:
    """To the bit: both step the same gradients."""
    found = run_ranks(2, HERE + "layer_wise", str(tmp_path))
    for of_rank in found:
        assert of_rank["kind"] == "LayerWiseDistributedOptimizer"
        assert of_rank["norms"] == of_rank["norms of theirs"] == found[0]["norms"]
        assert not of_rank["differing"] and of_rank["goes on"]
    sizes = [of_rank["states"] for of_rank in found]
    matrices, others = 2 * (32 * 64 + 32 * 32 + 32 * 96 + 48 * 32), 2 * 62 * 32 + 5 * 32
    assert sum(sizes) == matrices + 2 * others and max(sizes) < 0.7 * sum(sizes)


def in_shards(folder: str) -> bool:
    """Megatron-Core 0.19's default: a chain in a chain, of Muon layer-wise and Adam's distributed optimizer."""
    from megatron.core.distributed import DistributedDataParallel as DDP
    from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer.layer_wise_optimizer import (
        LayerWiseDistributedOptimizer,
        tag_params_for_buffer_routing,
    )

    from roll_batching.losses import SFTLoss
    from roll_batching.modeling.head import gpt_of
    from roll_batching.samples import distribute, gather_lengths
    from roll_batching.strategy import MegatronTrainStrategy

    meet("shards")
    config = _settings({"shards": True}, "bf16")
    plain, norms = _train(config)
    built, _ = _train(config, 0)
    model = built.chunks[0].module
    tag_params_for_buffer_routing([model])
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    parameters = [p for p in model.parameters() if p.requires_grad]
    layout = LayerWiseDistributedOptimizer.compute_full_param_layout(parameters, None, 2, ddp)
    chunks = [DDP(gpt_of(model).config, ddp, model, disable_bucketing=True, full_param_layout=layout)]
    gpt_of(model).config.finalize_model_grads_func = finalize_model_grads
    optimizer = _megatrons_optimizer(chunks, config, bf16=True)
    assert [type(link).__name__ for link in optimizer.chained_optimizers][0] == "LayerWiseDistributedOptimizer"
    strategy = MegatronTrainStrategy.from_parts(
        chunks, optimizer, config.batching(), vocab_size=62, scheduler=_schedule(optimizer), scheduler_unit="steps"
    )

    def step(number: int) -> float:
        local = _samples(list(range(strategy.layout.dp_rank, 8, 2)), number)
        plan = strategy.plan(gather_lengths(local))
        return strategy.train_step(distribute(local, plan), plan, SFTLoss()).grad_norm

    assert [step(number) for number in range(3)] == pytest.approx(norms, rel=1e-3)
    strategy.save(f"{folder}/shards")
    expected = step(3), _weights(chunks)
    strategy.load(f"{folder}/shards")
    assert step(3) == expected[0]
    assert all(torch.equal(value, expected[1][key]) for key, value in _weights(chunks).items())
    plain.load(f"{folder}/shards")  # whose optimizer has no shards of gradients
    part()
    return True


@needs_muon
@pytest.mark.skipif(IS_OLD, reason="Megatron-Core 0.16 has no layer-wise optimizer beside shards of gradients")
def test_a_callers_chain_of_chains(tmp_path: Path) -> None:
    assert run_ranks(2, HERE + "in_shards", str(tmp_path)) == [True, True]


# ---- checkpoints


CHECKPOINTS = "tests.strategy.test_checkpoint:"
ELSEWHERE: dict[str, Layout] = {
    "one rank": Layout(),
    "tp2": Layout(tp=2),
    "pp2": Layout(pp=2),
    "dp2": Layout(dp=2),
}


def _case(path: Path, layout: Layout, **training: Any) -> dict[str, Any]:
    muon = {"optimizer": "muon", "muon_tp_mode": "duplicated", **training}
    return {"path": str(path / "state"), "dtype": "bf16", "layout": layout.megatron(), "training": muon}


def goes_on_elsewhere(cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    from tests.strategy.test_checkpoint import load_and_go_on

    found = {}
    for name, case in cases.items():
        meet(name)
        found[name] = load_and_go_on(case)[1]
        part()
    return found


@needs_muon
def test_a_checkpoint_goes_on_to_the_bit_and_in_other_layouts(tmp_path: Path, report: Any) -> None:
    shards = Layout(dp=2, distopt=True)
    before = run_ranks(2, CHECKPOINTS + "save_and_go_on", _case(tmp_path, shards))
    after = run_ranks(2, CHECKPOINTS + "load_and_go_on", _case(tmp_path, shards))
    for (tensors, expected), (found, again) in zip(before, after, strict=True):
        assert tensors.keys() == found.keys() and any("momentum_buffer" in name for name in tensors)
        assert not [name for name in tensors if not torch.equal(tensors[name], found[name])]
        assert again == expected
    expected = before[0][1]
    for ranks in (1, 2):
        cases = {name: _case(tmp_path, layout) for name, layout in ELSEWHERE.items() if layout.ranks == ranks}
        for name, found in run_ranks(ranks, HERE + "goes_on_elsewhere", cases)[0].items():
            gaps = [abs(a[0] - b[0]) / b[0] for a, b in zip(found, expected, strict=True)]
            report(f"muon in bf16, from layer-wise dp2 to {name}: losses differ by {max(gaps):.1e}")
            assert max(gaps) < 1e-2 and [x[2] for x in found] == [x[2] for x in expected], name


def refused_checkpoint(case: dict[str, Any]) -> str:
    from roll_batching.errors import RollBatchingError
    from tests.strategy.test_checkpoint import strategy_of

    strategy = strategy_of(case)
    try:
        strategy.load(case["path"])
    except RollBatchingError as error:
        return str(error)
    return ""


@needs_muon
def test_adam_does_not_take_the_state_of_muon(tmp_path: Path) -> None:
    case = _case(tmp_path, Layout())
    run_ranks(1, CHECKPOINTS + "save_and_go_on", case)
    (text,) = run_ranks(1, HERE + "refused_checkpoint", {**case, "training": {"optimizer": "adam"}})
    assert "the state of another optimizer" in text and "training_args.optimizer" in text
