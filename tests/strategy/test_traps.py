"""Defects of the surroundings that nobody reports, shown to be there, and what keeps a step away from them.

What a caller's model could bring along is refused at construction: see `test_from_parts.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.ranks import run_ranks

pytestmark = pytest.mark.layouts


def batched_transfers(_: None) -> tuple[float, float]:
    """(gradient norm, that with Megatron's batched exchange) at two stages of two chunks."""
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    from roll_batching.losses import SFTLoss
    from roll_batching.samples import gather_lengths
    from roll_batching.strategy import schedule
    from tests.strategy.test_pipeline import _batch, _strategy
    from tests.support.models import fill, whole_gradients

    class MegatronsExchange(P2PCommunicator):
        """Its own way to learn shapes; with planned ones batched transfers fail at once."""

        def __init__(self, group: Any, config: Any, *_: Any) -> None:
            super().__init__(group, config)

        def check_exhausted(self, forward_only: bool) -> None:
            """Nothing was planned."""

    megatron = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    strategy = _strategy(megatron)
    batch = _batch()
    plan = strategy.plan(gather_lengths(batch))
    norms = []
    for batched in (False, True):
        fill(strategy.chunks, 61)
        config = strategy.chunks[0].config
        config.batch_p2p_comm = batched
        if batched:
            schedule.PlannedP2P = MegatronsExchange  # type: ignore[misc]
        strategy.train_step(batch, plan, SFTLoss())
        gradient = whole_gradients(strategy.chunks, 61, 0, False)["embedding.word_embeddings.weight"]
        norms.append(float(gradient.norm()))
        print("gradient norm", norms[-1], flush=True)
    return norms[0], norms[1]


def test_batched_transfers_at_two_stages_of_two_chunks_are_wrong_or_fail() -> None:
    """Which is why built models never batch them and `from_parts` refuses them."""
    outcomes = run_ranks(2, "tests.strategy.test_traps:batched_transfers", check=False, timeout=60)
    # Whatever comes, it comes of the batched exchange: the step with planned shapes is done by then.
    assert all("gradient norm" in outcome.output for outcome in outcomes), outcomes
    if all(outcome.returncode == 0 for outcome in outcomes):
        planned, batched = outcomes[0].result
        assert batched != pytest.approx(planned, rel=1e-3)
    elif all(outcome.returncode in (0, 1) for outcome in outcomes):  # no hang: another micro-batch's tensor came
        assert any("must match the size of tensor" in outcome.output for outcome in outcomes), outcomes


def scaled_in_place(_: None) -> tuple[float, float]:
    """Megatron divides the returned loss in place: what shares its memory changes with it."""
    from megatron.core.pipeline_parallel.schedules import forward_step_calc_loss
    from megatron.core.transformer.transformer_config import TransformerConfig

    from roll_batching.distributed.parallel_layout import make_layout, start_processes
    from roll_batching.planning import ParallelDims

    make_layout(ParallelDims(), start_processes())
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, use_cpu_initialization=True)
    loss = torch.tensor(8.0)
    logged: list[Any] = []
    forward_step_calc_loss(
        None, None, lambda _: (loss, {"loss": loss.detach()}), config, None, False, 4, logged, 1, True
    )  # fmt: skip
    from roll_batching.losses.contract import LossOutput
    from roll_batching.losses.runner import Scaling

    mine = torch.tensor(8.0)
    outputs = Scaling(per_token=False, num_micro_batches=4, dp_size=1).outputs(LossOutput(mine).loss, None, 0)
    forward_step_calc_loss(None, None, lambda _: outputs, config, None, False, 4, [], 1, True)
    return float(logged[0]["loss"]), float(mine)


def test_megatron_scales_the_returned_loss_in_place_and_ours_is_a_tensor_of_its_own() -> None:
    shared, mine = run_ranks(1, "tests.strategy.test_traps:scaled_in_place")[0]
    assert shared == 2.0
    assert mine == 8.0


def mutated_logits(_: None) -> tuple[bool, bool]:
    """(whether Megatron's cross entropy changed fp32 logits, whether ours did)."""
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    from roll_batching.distributed.parallel_layout import make_layout, start_processes
    from roll_batching.losses import token_log_probs
    from roll_batching.planning import ParallelDims

    layout = make_layout(ParallelDims(), start_processes())
    logits, labels = torch.randn(6, 1, 32), torch.randint(0, 32, (6, 1))
    theirs, ours = logits.clone(), logits.clone().requires_grad_()
    vocab_parallel_cross_entropy(theirs, labels)
    values, entropy = token_log_probs(ours[:, 0], labels[:, 0], entropy=True, tp_group=layout.tp_group)
    (values.sum() + entropy.sum()).backward()
    return not torch.equal(theirs, logits), not torch.equal(ours.detach(), logits)


def test_megatrons_cross_entropy_changes_fp32_logits_and_ours_does_not() -> None:
    assert run_ranks(1, "tests.strategy.test_traps:mutated_logits")[0] == (True, False)


def dropout_ratios(_: None) -> tuple[float, str]:
    """(largest first ratio when a model with dropout is trained on the shared plan, what a built model says)."""
    from roll_batching.errors import RollBatchingError
    from roll_batching.losses import PolicyLoss
    from roll_batching.samples import gather_lengths
    from roll_batching.strategy import MegatronTrainStrategy
    from tests.support.models import ARCHITECTURE, fill, random_batch, worker_config

    strategy = MegatronTrainStrategy(worker_config("packed", 64))
    strategy.initialize()
    fill(strategy.chunks, 61)
    for layer in strategy.chunks[0].module.decoder.layers:
        layer.hidden_dropout = 0.2
    batch = random_batch(5, 8, 40).without(["old_log_probs"])
    plan = strategy.plan(gather_lengths(batch))
    old = strategy.compute_log_probs(batch, plan, masks=("response_mask",))
    batch = batch.with_fields({"old_log_probs": old["log_probs"]}, {"old_log_probs": "next_token"})
    ratio = strategy.train_step(batch, plan, PolicyLoss()).metrics["ratio_max"]
    try:
        config = worker_config("packed", 64, architecture={**ARCHITECTURE, "hidden_dropout": 0.2})
        MegatronTrainStrategy(config).initialize()
    except RollBatchingError as error:
        return ratio, str(error)
    return ratio, "nothing"


def test_dropout_moves_the_first_ratio_and_is_refused_with_the_shared_plan() -> None:
    ratio, said = run_ranks(1, "tests.strategy.test_traps:dropout_ratios")[0]
    assert ratio > 1.01
    assert "hidden_dropout" in said and "logprob_plan" in said


def local_counts_under_context_parallelism(_: None) -> tuple[float, float, float]:
    """(gradient of one rank's share by a 3-tuple with local counts, by ours, by all rows at once)."""
    from roll_batching.distributed import Facts
    from roll_batching.losses import SFTLoss
    from roll_batching.samples import gather_lengths
    from roll_batching.strategy.schedule import run_schedule
    from tests.strategy.test_pipeline import _batch, _strategy
    from tests.support.models import fill, whole_gradients

    strategy = _strategy({"context_parallel_size": 2, "calculate_per_token_loss": False})
    batch = _batch()
    plan = strategy.plan(gather_lengths(batch))
    strategy.train_step(batch, plan, SFTLoss())
    ours = float(whole_gradients(strategy.chunks, 61, 0, False)["embedding.word_embeddings.weight"].norm())
    fill(strategy.chunks, 61)
    packs = strategy._pack(Facts(), batch, plan, ("response_mask",))
    head = strategy._head()

    def bind(pack: Any, chunk: Any) -> Any:
        mine = torch.from_numpy(pack.layout.local_tokens(strategy.layout.cp_rank))

        def loss_func(output: torch.Tensor) -> Any:
            log_probs, _ = head.log_probs(output, pack, chunk, entropy=False)
            mask = pack.masks["response_mask"][mine]
            return -(log_probs[mine] * mask).sum(), mask.sum().int(), {}

        return loss_func

    for chunk in strategy.chunks:
        chunk.zero_grad_buffer()
    run_schedule(plan, packs, strategy.chunks, bind, strategy.layout)
    theirs = float(whole_gradients(strategy.chunks, 61, 0, False)["embedding.word_embeddings.weight"].norm())
    return theirs, ours, theirs / ours


def test_counts_of_one_context_parallel_rank_give_other_gradients() -> None:
    """Megatron's 3-tuple without per-token loss divides by them; ours divides by counts of the whole step."""
    theirs, ours, _ = run_ranks(2, "tests.strategy.test_traps:local_counts_under_context_parallelism")[0]
    assert theirs != pytest.approx(ours, rel=1e-3)
