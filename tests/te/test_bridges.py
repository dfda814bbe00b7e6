"""Models that Megatron-Bridge, mbridge and Megatron's HybridModel build share prefixes and train under `from_parts`.

All build with TransformerEngine's layers; their own code runs, and only the innermost kernels are torch's. Right are
the logits of the model as it was built, on each sample alone. `scripts/te_environment.sh` installs both.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.ranks import run_ranks
from tests.te.engine import needs_engine

pytestmark = [pytest.mark.te, needs_engine]

SIZES = {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 96, "num_attention_heads": 4, "num_query_groups": 2}


def megatron_bridge() -> Any:
    from megatron.bridge.models.gpt_provider import GPTModelProvider

    provider = GPTModelProvider(
        **SIZES,
        kv_channels=16,
        seq_length=512,
        vocab_size=64,
        should_pad_vocab=False,
        normalization="RMSNorm",
        gated_linear_unit=True,
        add_bias_linear=False,
        position_embedding_type="rope",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
    )
    provider.finalize()
    return provider.provide(True, True)


def mbridge() -> Any:
    from mbridge import AutoBridge
    from transformers import Qwen3Config

    description = Qwen3Config(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=64, max_position_embeddings=512, tie_word_embeddings=False,
        architectures=["Qwen3ForCausalLM"],
    )  # fmt: skip
    description.rope_theta = 1e4  # where mbridge 0.15.1 reads it, and transformers 5 has it no more
    bridge = AutoBridge.from_config(description, dtype=torch.float32)
    bridge.config.use_cpu_initialization, bridge.config.gradient_accumulation_fusion = True, False
    return bridge._model_provider([])(True, True)


def hybrid_model() -> Any:
    """Megatron's HybridModel (0.18 and later) whose layers are attention or MLP."""
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        **{**SIZES, "num_layers": 4},
        normalization="RMSNorm",
        gated_linear_unit=True,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
    )
    return HybridModel(config, hybrid_stack_spec, 64, 512, "*-*-", position_embedding_type="rope")


BUILDERS = {"megatron_bridge": megatron_bridge, "mbridge": mbridge, "hybrid_model": hybrid_model}


def compare(name: str) -> dict[str, float]:
    """Largest differences of logits and gradients from those of each sample alone, and rows computed of the pack's."""
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from roll_batching.integrations.prefixes import share_prefixes_behind
    from roll_batching.megatron_patches import cpu_platform
    from roll_batching.planning import BatchingSpec
    from roll_batching.samples import SampleBatch, distribute
    from roll_batching.settings import BatchingConfig
    from roll_batching.strategy import MegatronInferStrategy
    from tests.strategy.test_from_parts import _start
    from tests.te.engine import as_if_on_an_h100
    from tests.te.plain_kernels import plain_kernels

    _start()
    cpu_platform.install()
    generator = torch.Generator().manual_seed(2)
    prompt = torch.randint(64, (30,), generator=generator)
    rows = [torch.cat([prompt, torch.randint(64, (n,), generator=generator)]) for n in (5, 9, 2)]

    def logits(model: Any, pack: list[torch.Tensor]) -> torch.Tensor:
        ends = torch.tensor([0, *(len(row) for row in pack)]).cumsum(0).int()
        longest = max(len(row) for row in pack)
        positions = torch.cat([torch.arange(len(row)) for row in pack])[None]
        params = PackedSeqParams("thd", ends, ends, ends, ends, longest, longest)
        answer: torch.Tensor = model(torch.cat(pack)[None], positions, None, packed_seq_params=params)
        return answer[0].float()

    def gradients(model: Any, packs: list[list[torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Of a sum of squares over the answers alone, as prompts' logits are one or many."""
        model.zero_grad(set_to_none=True)
        for pack in packs:
            answers = torch.cat([torch.arange(len(row)) >= len(prompt) for row in pack])
            logits(model, pack)[answers].square().sum().backward()
        return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}

    with as_if_on_an_h100(), plain_kernels():
        model_parallel_cuda_manual_seed(0)
        model = BUILDERS[name]().float().eval()
        with torch.no_grad():
            apart = [logits(model, [row]) for row in rows]
        expected = gradients(model, [[row] for row in rows])
        alone = torch.cat(apart)
        batching = BatchingConfig(
            train=BatchingSpec(mode="packed", max_tokens=256),
            infer=BatchingSpec(mode="packed", max_tokens=256),
            share_prefixes=True,
        )
        strategy = MegatronInferStrategy.from_model([model], batching)
        batch = SampleBatch.from_lists({"input_ids": rows}, {"input_ids": "token"})
        plan = strategy.plan(strategy.gather_table(batch), forward=True)
        right = [one.log_softmax(-1)[:-1].gather(1, row[1:, None])[:, 0] for one, row in zip(apart, rows, strict=True)]
        log_probs = strategy.compute_log_probs(distribute(batch, plan), plan).select_ids(batch.ids)
        ours = [row[:-1] for row in log_probs.to_lists("log_probs")]
        gap_of_strategy = max(float((a - b).abs().max()) for a, b in zip(ours, right, strict=True))
        share_prefixes_behind(model)
        computed: list[int] = []
        model.decoder.layers[0].register_forward_pre_hook(
            lambda layer, args, kwargs: computed.append(len(kwargs["hidden_states"])), with_kwargs=True
        )
        with torch.no_grad():
            together = logits(model, rows)
        behind = gradients(model, [rows])
    worst = max(float((behind[name] - right).abs().max() / right.abs().max()) for name, right in expected.items())
    shared = int(plan.shared.sum())
    return {
        "gap_of_strategy": gap_of_strategy,
        "shared": shared,
        "gap": float((together - alone).abs().max()),
        "size": float(alone.abs().max()),
        "computed": computed[0],
        "gap_of_gradients": worst,
        "weights": (len(expected), len(behind)),
    }


@pytest.mark.parametrize("name", BUILDERS)
def test_models_of_bridges_share_prefixes(name: str) -> None:
    modules = {"megatron_bridge": "megatron.bridge", "hybrid_model": "megatron.core.models.hybrid"}
    pytest.importorskip(modules.get(name, name))
    (found,) = run_ranks(1, "tests.te.test_bridges:compare", name)
    assert found["gap_of_strategy"] < 1e-5 and found["shared"] == 2 * 29
    assert found["gap"] < 1e-5 < 1e-2 < found["size"]
    assert found["gap_of_gradients"] < 1e-4 and found["weights"][0] == found["weights"][1] > 8
    # The last token of the prompt is computed by each: the token after it differs.
    assert found["computed"] == 29 + 6 + 10 + 3


def train(name: str) -> dict[str, Any]:
    """Losses of four steps under `from_parts`, and the first loss of the model as it was built, sample by sample."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    import roll_batching as rb
    from tests.strategy.test_from_parts import _start
    from tests.te.engine import as_if_on_an_h100
    from tests.te.plain_kernels import plain_kernels

    _start()
    # It asks for the stream of the GPU that `as_if_on_an_h100` claims.
    torch.optim.Optimizer._accelerator_graph_capture_health_check = lambda self: None  # type: ignore[attr-defined]
    rows = [torch.arange(start, start + length) % 11 for start, length in enumerate((30, 9, 21, 5))]
    with as_if_on_an_h100(), plain_kernels():
        model_parallel_cuda_manual_seed(0)
        model = BUILDERS[name]().float()
        with torch.no_grad():
            logits = [model(row[None], torch.arange(len(row))[None], None)[0] for row in rows]
        pairs = zip(logits, rows, strict=True)
        nll = [torch.nn.functional.cross_entropy(x[:-1], row[1:], reduction="sum") for x, row in pairs]
        model.config.finalize_model_grads_func = finalize_model_grads
        ddp = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
        optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-2, params_dtype=torch.float32), [ddp])
        packed = rb.BatchingSpec(mode="packed", max_tokens=64)
        strategy = rb.MegatronTrainStrategy.from_parts([ddp], optimizer, rb.BatchingConfig(train=packed, infer=packed))
        fields = {"input_ids": rows, "response_mask": [torch.ones_like(row) for row in rows]}
        batch = rb.SampleBatch.from_lists(fields, dict.fromkeys(fields, "token"))
        plan = strategy.plan(strategy.gather_table(batch))
        losses = [strategy.train_step(rb.distribute(batch, plan), plan, rb.SFTLoss()).loss for _ in range(4)]
    return {"losses": losses, "alone": float(sum(nll)) / sum(len(row) - 1 for row in rows)}


@pytest.mark.parametrize("name", BUILDERS)
def test_models_of_bridges_train_under_from_parts(name: str) -> None:
    modules = {"megatron_bridge": "megatron.bridge", "hybrid_model": "megatron.core.models.hybrid"}
    pytest.importorskip(modules.get(name, name))
    (found,) = run_ranks(1, "tests.te.test_bridges:train", name)
    assert found["losses"][0] == pytest.approx(found["alone"], rel=1e-5)
    assert found["losses"][-1] < 0.9 * found["losses"][0]
