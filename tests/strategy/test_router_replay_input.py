"""Experts that cannot be replayed: a clear error on every rank, before the model runs. And shared prefixes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.ranks import run_ranks

pytestmark = pytest.mark.bad_input

HERE = "tests.strategy.test_router_replay_input:"
ROUTER = "softmax"


def strategy_of(**options: Any) -> Any:
    from roll_batching.strategy import MegatronTrainStrategy
    from tests.strategy.test_router_replay import LAYERS, ROUTERS
    from tests.support.models import ARCHITECTURE, fill, worker_config

    shape = {**ARCHITECTURE, "num_layers": LAYERS, "moe": ROUTERS[ROUTER], **options.pop("architecture", {})}
    strategy = MegatronTrainStrategy(worker_config("packed", 64, architecture=shape, **options))
    strategy.initialize()
    fill(strategy.chunks, 61, strategy.layout.tp_rank, strategy.layout.tp_size)
    return strategy


def said(strategy: Any, field: torch.Tensor | None, spec: Any = None, train: bool = True) -> str:
    """The error for a batch with this field of experts; "nothing" if there is none."""
    from roll_batching.errors import RollBatchingError
    from roll_batching.losses import SFTLoss
    from roll_batching.samples import distribute, gather_lengths
    from roll_batching.samples.fields import EXPERTS_SPEC
    from tests.strategy.test_router_replay import batch_of

    batch = batch_of(ROUTER).without("routed_experts")
    batch = batch.select(torch.arange(strategy.layout.dp_rank, len(batch), strategy.layout.dp_size))
    if field is not None:
        rows = field[: batch.num_tokens]
        batch = batch.with_fields({"routed_experts": rows}, {"routed_experts": spec or EXPERTS_SPEC})
    plan = strategy.plan(gather_lengths(batch))
    try:
        if train:
            strategy.train_step(distribute(batch, plan), plan, SFTLoss())
        else:
            strategy.forward(batch, plan, ("log_probs", "routed_experts"))
    except RollBatchingError as error:
        return str(error)
    return "nothing"


def wrong_fields(_: None) -> dict[str, str]:
    from roll_batching.samples import FieldSpec
    from tests.strategy.test_router_replay import batch_of

    good = batch_of(ROUTER)["routed_experts"]
    changed = {name: good.clone() for name in ("large", "negative", "twice", "partly")}
    changed["large"][5, 2, 1] = 4
    changed["negative"][5, 2] = -2
    changed["twice"][5, 2] = 3
    changed["partly"][5, 2] = torch.tensor([-1, 3])
    strategy = strategy_of()
    found = {name: said(strategy, field) for name, field in changed.items()}
    found |= {
        "good": said(strategy, good),
        "wide": said(strategy, good.int()),
        "layers": said(strategy, good[:, :3].contiguous()),
        "top-k": said(strategy, good[..., :1].contiguous()),
        "dtype": said(strategy, good.float()),
        "kind": said(strategy, good, FieldSpec("next_token", pad=-1)),
        "pad": said(strategy, good, FieldSpec("token")),
    }
    return found


def test_wrong_experts_are_refused_by_sample_token_and_layer() -> None:
    (found,) = run_ranks(1, HERE + "wrong_fields", None)
    assert found["good"] == found["wide"] == "nothing"
    place = "token 5, layer 2 has"
    assert place in found["large"] and "an expert outside 0 to 3: [" in found["large"]
    assert place in found["negative"] and "an expert outside 0 to 3: [-2, -2]" in found["negative"]
    assert place in found["twice"] and "an expert twice: [3, 3]" in found["twice"]
    assert place in found["partly"] and "some experts and -1 for others: [-1, 3]" in found["partly"]
    for name in ("layers", "top-k"):
        assert "takes [tokens, 4 layers with experts, 2 experts per token]" in found[name]
    assert "torch.float32: give int16" in found["dtype"]
    assert "next_token field with pad -1" in found["kind"] and "token field with pad 0" in found["pad"]


def models_without(_: None) -> dict[str, str]:
    from dataclasses import replace

    from tests.strategy.test_router_replay import batch_of

    good = batch_of(ROUTER)["routed_experts"]
    dense = strategy_of(architecture={"moe": None})
    found = {"dense": said(dense, good), "dense, recorded": said(dense, None, train=False)}
    strategy = strategy_of()
    config = strategy.chunks[0].module.config
    config.moe_router_fusion = True
    found["fused"] = said(strategy, good)
    config.moe_router_fusion = False
    strategy.state = replace(strategy.state, settings=replace(strategy.settings, rows_form=True))
    found["rows"] = said(strategy, good)
    return found


def test_models_that_cannot_replay_are_named() -> None:
    (found,) = run_ranks(1, HERE + "models_without", None)
    for name in ("dense", "dense, recorded"):
        assert "the model has no mixture of experts: leave out router_replay" in found[name]
    assert "moe_router_fusion chooses experts inside a kernel" in found["fused"]
    assert "rows_form orders tokens by position" in found["rows"]


def one_rank_lacks(_: None) -> list[str]:
    from tests.strategy.test_router_replay import batch_of

    strategy = strategy_of(megatron={"tensor_model_parallel_size": 2, "sequence_parallel": True})
    good = batch_of(ROUTER)["routed_experts"]
    return [said(strategy, good if strategy.layout.tp_rank else None), said(strategy, good)]


def test_a_rank_without_the_field_is_one_error_on_all() -> None:
    for first, second in run_ranks(2, HERE + "one_rank_lacks", None):
        assert "routed_experts" in first and "differ" in first.lower(), first
        assert second == "nothing"


def shared(_: None) -> dict[str, Any]:
    """Groups with a common prompt, in packs that share it and in packs that do not."""
    from dataclasses import replace

    from roll_batching.losses import SFTLoss
    from roll_batching.samples import SampleBatch

    g = torch.Generator().manual_seed(3)
    prompt = torch.randint(0, 61, (20,), generator=g)
    rows = [torch.cat([prompt, torch.randint(0, 61, (n,), generator=g)]) for n in (5, 9, 1, 12)]
    masks = [torch.arange(len(row)) >= 20 for row in rows]
    schema = {"input_ids": "token", "response_mask": "token"}
    batch = SampleBatch.from_lists({"input_ids": rows, "response_mask": masks}, schema)
    strategy = strategy_of()
    found: dict[str, Any] = {}
    for sharing in (True, False):
        strategy.state = replace(strategy.state, batching=replace(strategy.batching, share_prefixes=sharing))
        plan = strategy.plan(strategy.gather_table(batch))
        results = strategy.forward(batch, plan, ("log_probs", "routed_experts"))
        experts = results["routed_experts"]
        with_experts = batch.with_fields(
            {"routed_experts": experts}, {"routed_experts": results.schema["routed_experts"]}
        )
        found[f"shared {sharing}"] = int(plan.shared.sum())
        found[f"experts {sharing}"] = experts
        for name, one in (("free", batch), ("replayed", with_experts)):
            strategy.zero_grad()
            loss, _ = strategy.forward_backward(one, plan, SFTLoss())
            found[f"{name} {sharing}"] = loss, [p.main_grad.clone() for p in strategy.chunks[0].parameters()]
    return found


def test_shared_prefixes_have_the_experts_of_every_sample() -> None:
    (found,) = run_ranks(1, HERE + "shared", None)
    assert found["shared True"] > 0 and found["shared False"] == 0
    assert torch.equal(found["experts True"], found["experts False"]) and int(found["experts True"].min()) >= 0
    for sharing in (True, False):
        (free, one), (replayed, other) = found[f"free {sharing}"], found[f"replayed {sharing}"]
        assert free == replayed and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
