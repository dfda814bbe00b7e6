"""Bring your own: a Megatron model that exists is trained by our plan, packing, schedule and loss, unchanged."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ranks import ROOT, run_ranks

pytestmark = pytest.mark.layouts

CAP = 64


def _batch() -> Any:
    from tests.support.models import random_batch

    return random_batch(17, 9, 40)


def _loss() -> Any:
    from roll_batching.losses import PolicyLoss

    return PolicyLoss(clip_low=0.2, clip_high=0.28, kl_coef=0.05, kl_bound=None, entropy_coef=0.02)


def _batching(mode: str) -> Any:
    from roll_batching.planning import BatchingSpec
    from roll_batching.settings import BatchingConfig

    options: dict[str, Any] = {"padded": {"rows": 3, "algorithm": "none"}}.get(mode, {"max_tokens": CAP})
    if mode == "dynamic":
        options |= {"algorithm": "roll", "sequence_length_round": 4}
    one = BatchingSpec(mode=mode, **options)
    return BatchingConfig(train=one, infer=one)


def _start(**sizes: int) -> None:
    from megatron.core import parallel_state

    from roll_batching.distributed.parallel_layout import start_processes

    start_processes()
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    vpp = sizes.get("vpp", 1)
    parallel_state.initialize_model_parallel(
        sizes.get("tp", 1), sizes.get("pp", 1), vpp if vpp > 1 else None, context_parallel_size=sizes.get("cp", 1)
    )


def _compare(chunks: list[Any], optimizer: Any, mode: str, folder: str, **options: Any) -> tuple[float, float, str]:
    """(loss difference, worst gradient difference, its parameter) of one forward and backward."""
    from roll_batching.modeling.head import gpt_of
    from roll_batching.samples import distribute, gather_lengths
    from roll_batching.strategy import MegatronTrainStrategy
    from tests.support.models import whole_gradients, worst_difference

    keys = [sorted(chunk.state_dict()) for chunk in chunks]
    parameters = [[id(p) for p in chunk.parameters()] for chunk in chunks]
    strategy = MegatronTrainStrategy.from_parts(chunks, optimizer, _batching(mode), vocab_size=61, **options)
    whole, dp = _batch(), strategy.layout
    local = whole.select(torch.arange(dp.dp_rank, len(whole), dp.dp_size))
    plan = strategy.plan(gather_lengths(local))
    loss, _ = strategy.forward_backward(distribute(local, plan), plan, _loss())
    if optimizer is None:
        for p in gpt_of(chunks[0]).parameters():
            p.main_grad = torch.zeros_like(p) if p.grad is None else p.grad
    assert [sorted(chunk.state_dict()) for chunk in chunks] == keys
    assert [[id(p) for p in chunk.parameters()] for chunk in chunks] == parameters
    expected_loss, expected = torch.load(Path(folder) / "reference.pt")
    gradient, name = worst_difference(whole_gradients(chunks, 61, dp.tp_rank, False), expected)
    return abs(loss - expected_loss) / abs(expected_loss), gradient, name


def write_reference(folder: str) -> None:
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from tests.support.reference import gradients, policy_loss, stock_model

    _start()
    model_parallel_cuda_manual_seed(0)
    model = stock_model()
    loss = policy_loss(model, _batch(), clip=(0.2, 0.28), kl=0.05, entropy=0.02)
    torch.save((float(loss), gradients(model, loss)), Path(folder) / "reference.pt")


@pytest.fixture(scope="module")
def reference() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(1, "tests.strategy.test_from_parts:write_reference", folder)
        yield folder


def one_rank_cases(folder: str) -> dict[str, tuple[float, float, str]]:
    from roll_batching.modeling.head import gpt_of
    from tests.support.own_model import build

    _start()
    found = {}
    for per_token in (True, False):
        for defer in (False, True):
            for rotate in ("model", "core"):
                parts = build("packed", rotate=rotate, calculate_per_token_loss=per_token)
                key = f"packed per_token={per_token} defer={defer} rotation by {rotate}"
                found[key] = _compare(*parts, "packed", folder, defer_head=defer)
        for mode in ("padded", "dynamic"):
            parts = build("stock", calculate_per_token_loss=per_token)
            found[f"rows form {mode} per_token={per_token}"] = _compare(*parts, mode, folder, rows_form=True)
    parts = build("packed", calculate_per_token_loss=True)
    layer: Any = gpt_of(parts[0][0]).output_layer  # as a later Megatron may have it
    layer.__class__ = type("Later", (type(layer),), {"__module__": type(layer).__module__})
    found["a subclass of the head"] = _compare(*parts, "packed", folder, defer_head=True)
    found["outside DDP"] = _compare(*build("packed", wrapped=False, calculate_per_token_loss=True), "packed", folder)
    found["outside DDP, mean"] = _compare(*build("packed", wrapped=False), "packed", folder)
    return found


def two_rank_cases(folder: str) -> dict[str, tuple[float, float, str]]:
    from tests.support.own_model import build

    found = {}
    for name, sizes in {"dp2": {}, "tp2": {"tp": 2}, "pp2": {"pp": 2}, "cp2": {"cp": 2}}.items():
        _start(**sizes)
        for per_token in (True, False):
            rotate = "core" if name == "cp2" else "model"
            parts = build("packed", rotate=rotate, calculate_per_token_loss=per_token, variable_seq_lengths=True)
            key = f"{name} packed per_token={per_token}"
            found[key] = _compare(*parts, "packed", folder, defer_head=per_token)
        core = "rows" if name == "cp2" else "stock"
        for mode in ("padded", "dynamic"):
            for defer in (False, True):
                parts = build(core, variable_seq_lengths=True)
                key = f"{name} rows form {mode} defer={defer}"
                found[key] = _compare(*parts, mode, folder, rows_form=True, defer_head=defer)
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_callers_model_gives_the_reference_loss_and_gradients(reference: str, ranks: int, report: Any) -> None:
    cases = "one_rank_cases" if ranks == 1 else "two_rank_cases"
    found = run_ranks(ranks, f"tests.strategy.test_from_parts:{cases}", reference, timeout=300)[0]
    for name, (loss, gradient, parameter) in found.items():
        report(f"a caller's model: {name:52} loss {loss:.1e}, gradient {gradient:.1e} ({parameter})")
    assert max(loss for loss, _, _ in found.values()) < 1e-5
    assert max(gradient for _, gradient, _ in found.values()) < 1e-5


# ---- what cannot work is said at construction


def problems(_: None) -> dict[str, str]:
    from roll_batching.errors import LayoutError, RankError
    from roll_batching.strategy import MegatronTrainStrategy
    from tests.strategy.test_adoption import YARN
    from tests.support.own_model import build

    def attempt(parts: Any, mode: str = "packed", **options: Any) -> str:
        try:
            MegatronTrainStrategy.from_parts(*parts, _batching(mode), **options)
        except (LayoutError, RankError) as error:
            return str(error)
        return "nothing"

    def changed(name: str, value: Any, **options: Any) -> Any:
        parts = build("packed", **options)
        setattr(parts[0][0].config, name, value)
        return parts

    _start()
    said = {
        "fine": attempt(build("packed")),
        "fine, of Megatron's layers": attempt(build("stock")),
        "rows form packed": attempt(build("stock"), rows_form=True),
        "rows form of a packed core": attempt(build("packed"), "padded", rows_form=True),
        "not a GPT": attempt(([torch.nn.Linear(2, 2)], None)),
        "no self-attention": attempt(_without_attention(build("packed"))),
        "no finalize": attempt(changed("finalize_model_grads_func", None)),
        "overlap without no_sync": attempt(build("packed", bucketed=True)),
        "dropout": attempt(build("packed", hidden_dropout=0.1)),
        "fp8": attempt(changed("fp8", "e4m3")),
        "fp4": attempt(changed("fp4", "e2m1")),
        "cuda graphs": attempt(changed("cuda_graph_impl", "local")),
        "interleaved fused rope": attempt(_interleaved(build("packed"))),
        "YaRN's fused rope": attempt(_fused_yarn(build("stock", positions="yarn", settings_after=YARN))),
        "images' rotation": attempt(_positions(build("packed"), "mrope")),
        "two rotations": attempt(_positions(build("packed", rotate="core"), "rope")),
        "deferred wgrad": attempt(changed("defer_embedding_wgrad_compute", True), defer_head=True),
    }
    return said


def _without_attention(parts: Any) -> Any:
    """As in Megatron's MambaModel."""
    del parts[0][0].module.decoder.layers[0].self_attention
    return parts


def _interleaved(parts: Any) -> Any:
    parts[0][0].config.apply_rope_fusion = parts[0][0].config.rotary_interleaved = True
    return parts


def _fused_yarn(parts: Any) -> Any:
    parts[0][0].config.apply_rope_fusion = True
    return parts


def _positions(parts: Any, kind: str) -> Any:
    parts[0][0].module.position_embedding_type = kind
    return parts


def pipeline_problems(_: None) -> dict[str, str]:
    from roll_batching.errors import LayoutError, RankError
    from roll_batching.strategy import MegatronTrainStrategy
    from tests.support.own_model import build

    said = {}
    _start(pp=2)
    cases: dict[str, dict[str, Any]] = {
        "batched p2p": {"batch_p2p_comm": True},
        "overlapped p2p": {"overlap_p2p_comm": True},
    }
    for name, options in cases.items():
        parts = build("packed")
        for key, value in options.items():
            setattr(parts[0][0].config, key, value)
        try:
            MegatronTrainStrategy.from_parts(*parts, _batching("packed"))
        except (LayoutError, RankError) as error:
            said[name] = str(error)
    _start()
    try:
        MegatronTrainStrategy.from_parts(*build("packed", wrapped=False), _batching("packed"))
    except RankError as error:
        said["outside DDP"] = str(error)
    return said


SAYS = {
    "rows form packed": "rows_form serves padded and dynamic batching only",
    "rows form of a packed core": "leave rows_form out",
    "not a GPT": "Linear is not a GPTModel",
    "no finalize": "finalize_model_grads_func is None",
    "overlap without no_sync": "set it to the chunks' no_sync",
    "dropout": "logprob_plan to 'own' or 'none'",
    "fp8": "fp8_recipe=delayed is not supported: it scales by the largest values of earlier passes",
    "fp4": "fp4 is not supported for now: unset it",
    "cuda graphs": "cuda_graph_impl='none'",
    "interleaved fused rope": "unset apply_rope_fusion",
    "YaRN's fused rope": "leaves out YaRN's factor of 1.139",
    "images' rotation": "position_embedding_type='mrope' is not supported",
    "two rotations": "position_embedding_type='none'",
    "deferred wgrad": "exclude each other",
    "batched p2p": "set config.batch_p2p_comm=False",
    "no self-attention": "TransformerLayer of TransformerBlock has no self_attention",
    "overlapped p2p": "set config.overlap_p2p_comm=False",
    "outside DDP": "wrap them",
}


def test_what_cannot_work_is_said_at_construction() -> None:
    said = run_ranks(1, "tests.strategy.test_from_parts:problems")[0]
    said |= run_ranks(2, "tests.strategy.test_from_parts:pipeline_problems")[1]
    assert said.pop("fine") == said.pop("fine, of Megatron's layers") == "nothing"
    assert set(said) == set(SAYS)
    for name, part in SAYS.items():
        assert part in said[name], (name, said[name])


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_example_prints_equal_losses(ranks: int) -> None:
    launcher = [sys.executable, "-W", "ignore"]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*launcher, "examples/your_megatron_loop.py"],
        cwd=ROOT,
        env=dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("step ")]
    assert len(lines) == 3


def expert_layout(etp_size: int | None) -> dict[str, Any]:
    from megatron.core import parallel_state

    from roll_batching.distributed.parallel_layout import describe_layout, start_processes
    from roll_batching.planning import BatchingSpec, PlanConstraints

    device = start_processes()
    parallel_state.initialize_model_parallel(
        2, expert_model_parallel_size=2 if etp_size == 1 else 1, expert_tensor_parallel_size=etp_size
    )
    layout = describe_layout(vpp_size=1, sequence_parallel=False, device=device)
    constraints = PlanConstraints.of(layout.dims, BatchingSpec(max_tokens=64))
    torch.distributed.barrier()  # rank 0 keeps the store that the others still read
    return {"etp": layout.etp_size, "width": constraints.lockstep_ranks, "ep_size": layout.ep_size}


@pytest.mark.parametrize(("etp_size", "found"), [(None, 2), (1, 1)])
def test_the_experts_of_existing_groups_reach_the_plan(etp_size: int | None, found: int) -> None:
    for layout in run_ranks(2, "tests.strategy.test_from_parts:expert_layout", etp_size):
        assert layout["etp"] == found
        assert layout["ep_size"] == (2 if etp_size == 1 else 1) and layout["width"] == 1


def plans_of_an_expert_strategy(_: None) -> tuple[Any, str]:
    from roll_batching.errors import RankError
    from roll_batching.losses import SFTLoss
    from roll_batching.planning import plan_step
    from roll_batching.samples import gather_lengths
    from roll_batching.strategy import MegatronTrainStrategy
    from tests.support.models import ARCHITECTURE, worker_config

    moe = {"num_experts": 4, "router_topk": 2, "ffn_hidden_size": 24}
    config = worker_config(
        "packed", 64, megatron={"expert_model_parallel_size": 2}, architecture={**ARCHITECTURE, "moe": moe}
    )
    strategy = MegatronTrainStrategy(config)
    strategy.initialize()
    batch = _samples_of(strategy.layout.dp_rank)
    table = gather_lengths(batch)
    planned = strategy.plan(table).constraints
    alone = plan_step(table.lengths, replace(planned, ep_size=1), ids=table.ids)
    with pytest.raises(RankError) as caught:
        strategy.train_step(batch, alone, SFTLoss())
    torch.distributed.barrier()
    return planned, str(caught.value)


def _samples_of(rank: int) -> Any:
    from roll_batching.samples import SampleBatch

    rows = [torch.arange(5 + i) for i in range(3)]
    return SampleBatch.from_lists({"input_ids": rows}, {"input_ids": "token"}, ids=[3 * rank + i for i in range(3)])


def test_expert_parallelism_reaches_the_plan_and_is_compared() -> None:
    for planned, message in run_ranks(2, "tests.strategy.test_from_parts:plans_of_an_expert_strategy"):
        assert planned.ep_size == 2 and planned.lockstep_ranks == 2 and not planned.fully_sharded
        assert "made for ep_size=1 and this job runs 2" in message


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"overlap_param_gather": True, "use_distributed_optimizer": True, "overlap_grad_reduce": True}, False),
        ({"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim"}, False),
        ({"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"}, True),
    ],
)
def test_only_shards_gathered_layer_by_layer_make_ranks_meet(options: dict[str, Any], expected: bool) -> None:
    from megatron.core.distributed import DistributedDataParallelConfig

    from roll_batching.strategy.from_parts import gathers_every_layer

    assert gathers_every_layer(DistributedDataParallelConfig(**options)) is expected
    assert not gathers_every_layer(None)
