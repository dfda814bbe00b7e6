"""Models other than the policy: a pass of any model over a whole batch, and functions of single roles.

`run_on` serves every frozen model of a job (reference, teacher, critic) and the old log-probs of the policy. A teacher
gives its most likely tokens; the reference of a policy with adapters is the policy without them; a critic starts with
the policy's weights.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch

from roll_batching.errors import LayoutError, LossError, PlanError
from roll_batching.modeling.adapters import adapters_off
from roll_batching.modeling.experts import expert_biases
from roll_batching.modeling.head import gpt_of
from roll_batching.modeling.pretrained import VALUE_HEAD
from roll_batching.planning import Plan
from roll_batching.samples import FieldSpec, SampleBatch, collect, distribute
from roll_batching.samples.layout_exchange import LayoutExchange
from roll_batching.settings import RoleSettings
from roll_batching.strategy.infer import MegatronInferStrategy
from roll_batching.strategy.model_state import ModelState, StepSettings
from roll_batching.strategy.offload import OffloadedStates, OffloadStats
from roll_batching.strategy.optimizer_step import share_columns
from roll_batching.strategy.schedule import Packs
from roll_batching.strategy.train import MegatronTrainStrategy
from roll_batching.strategy.weights import has_same_stages

T = TypeVar("T")
_SHARE_OF_TIMEOUT = 0.8
"""Part of `backend_timeout` for planning: a rank that hangs must report it before the others stop waiting."""


def run_on(
    model: MegatronInferStrategy,
    batch: SampleBatch,
    run: Callable[[SampleBatch, Plan], SampleBatch],
    home: MegatronInferStrategy | None = None,
    *,
    plans: Iterable[Plan] | None = None,
) -> SampleBatch:
    """Results of `model` for the samples of all ranks, in the order of `batch`. Collective.

    Args:
        model: the strategy that computes, in any parallel layout of these processes.
        batch: this rank's samples, in the layout of `home`, with the fields that `run` reads.
        run: computes the results of samples placed by a plan, such as `model.compute_log_probs`.
        home: the strategy in whose layout `batch` lies, and the results. None: `model`.
        plans: plans over the samples, for a model in the layout of `home`: those of training, so that the pass rounds
            as training does. None: one plan for passes without gradient, by the settings of `model`.

    Returns:
        The fields of `run`'s result, one row per sample of `batch`. Samples outside of all `plans` have pad values.

    Raises:
        LayoutError: for `plans` and a model in another layout than `home`.
        RankError: on all ranks, when planning fails or hangs on any; and the errors of `run`.
    """
    home = model if home is None else home
    exchange = None
    if model.layout.dims != home.layout.dims:
        exchange = LayoutExchange.of(home.layout.dp_rank, model.layout.dp_rank)
    if exchange is not None and plans is not None:
        raise LayoutError("run_on got plans for a model in another parallel layout: leave out plans, it makes its own")
    if plans is None:
        table = model.gather_table(batch, home.layout.dp_group)
        table = table.select(np.argsort(table.ids))  # plans do not depend on which rank holds which sample
        planned = table if exchange is None else exchange.in_target(table)
        plans = [agree_on_plan(model, lambda: model.plan(planned, forward=True))]
    parts = []
    for plan in plans:
        if exchange is None:
            results = run(distribute(batch, plan), plan)
            parts.append(collect(results, plan, like=batch))
        else:
            results = run(exchange.distribute(batch, plan, table), plan)
            parts.append(exchange.collect(results, plan, table, like=batch))
    return _with_all_samples(SampleBatch.concat(parts), batch)


def _with_all_samples(computed: SampleBatch, batch: SampleBatch) -> SampleBatch:
    """`computed` in the order of `batch`, with pad values for samples that it lacks."""
    missing = batch.select(torch.nonzero(~computed.find(batch.ids)[1])[:, 0])
    padding = {
        name: computed[name].new_full((missing.num_tokens, *computed[name].shape[1:]), spec.pad)
        for name, spec in computed.schema.items()
    }
    padded = SampleBatch(missing.ids, missing.lengths, padding, computed.schema)
    return SampleBatch.concat([computed, padded]).select_ids(batch.ids)


def agree_on_plan(strategy: MegatronInferStrategy, make_plan: Callable[[], T]) -> T:
    """The result of `make_plan`. Collective; raises RankError, the same on all ranks, when it fails or hangs on one.

    A user's packing algorithm may fail or hang on one rank alone. Ranks with different plans are found where a plan is
    first used (`distribute`, and every pass).
    """
    with strategy.layout.team.agree("planning"):
        plan = _plan_with_timeout(strategy, make_plan)
    return plan


def _plan_with_timeout(strategy: MegatronInferStrategy, make_plan: Callable[[], T]) -> T:
    """The result of `make_plan`. Raises PlanError at the timeout, and abandons the thread that plans."""
    if strategy.config is None:
        return make_plan()
    planned: Future[T] = Future()

    def plan() -> None:
        try:
            planned.set_result(make_plan())
        except BaseException as error:  # of any kind: raised on the rank's own thread
            planned.set_exception(error)

    threading.Thread(target=plan, name="planning", daemon=True).start()
    minutes = strategy.config.backend_timeout
    try:
        return planned.result(_SHARE_OF_TIMEOUT * 60 * minutes)
    except TimeoutError:
        if planned.done():  # raised by the planning itself
            raise
        raise PlanError(
            f"the packing algorithm {strategy.batching.train.algorithm!r} has not returned after "
            f"{_SHARE_OF_TIMEOUT * minutes:.3g} minutes, {_SHARE_OF_TIMEOUT:.0%} of backend_timeout: fix it, or raise "
            "backend_timeout"
        ) from None


# ---- the reference of a policy with adapters


class BaseReference(MegatronInferStrategy):
    """Forward passes of the frozen model under a policy's adapters, in the policy's layout.

    Args:
        policy: a strategy whose model has adapters.
        config: the reference's settings; only those of its micro-batches are read.

    Raises:
        LayoutError: for a policy without adapters.
    """

    has_own_weights = False

    def __init__(self, policy: MegatronInferStrategy, config: RoleSettings) -> None:
        super().__init__(config, seed=policy.seed, temperature=policy.temperature)
        if policy.state.adapters is None:
            raise LayoutError(
                "the policy has no adapters under which to find its frozen base: set model_args.lora_target, or load "
                "the reference's weights into a strategy of its own"
            )
        self._policy, self._settings = policy, StepSettings.of(config, policy.layout.dp_size)
        self._batching = config.batching()
        self._batching.load_algorithms()

    @property  # type: ignore[override]  # the policy's; only the reference's own settings can be set
    def state(self) -> ModelState:
        """The policy's state now, with the reference's batching."""
        return replace(self._policy.state, batching=self._batching, settings=self._settings, training=None)

    @state.setter
    def state(self, state: ModelState) -> None:
        self._batching, self._settings = state.batching, state.settings

    @cached_property
    def _offload(self) -> OffloadedStates:
        return self._policy._offload

    @property
    def offload_stats(self) -> OffloadStats:
        """Always zero: the policy counts the transfers of the shared model."""
        return OffloadStats()

    def _run(self, plan: Plan, packs: Packs, bind: Any, **options: Any) -> list[Any]:
        with adapters_off(self.chunks):
            return super()._run(plan, packs, bind, **options)


# ---- a teacher's tokens


def top_log_probs(
    strategy: MegatronInferStrategy, local: SampleBatch, plan: Plan, k: int, masks: Sequence[str] | None = None
) -> SampleBatch:
    """The `k` most likely next tokens of the model at each position, in the order of `local`. Collective.

    Arguments are those of `MegatronInferStrategy.forward`.

    Returns:
        A batch with `local`'s ids and lengths and the next_token fields `top_log_probs` [tokens, k], fp32, over the
        whole vocabulary, descending, and `top_ids` [tokens, k], int32. Both are 0 where no mask counts.

    Raises:
        RankError: on all ranks, before the model runs for wrong input of any, or for outputs that are not finite.
    """
    with strategy._consensus("top_log_probs") as facts:
        strategy._head().require(("log_probs",), "top_log_probs")
        size = strategy.state.vocab_size
        if isinstance(k, bool) or not isinstance(k, int) or k < 1 or (size is not None and k > size):
            of = "" if size is None else f" to {size}, the vocabulary of the model"
            raise LossError(f"top_log_probs(k={k!r}): give a number of tokens from 1{of}")
        facts.equal("k and masks", (k, masks))
        packs = strategy._pack(facts, local, plan, masks)
    head = strategy._head()
    results = strategy._collect(plan, packs, lambda output, pack, chunk: head.top_log_probs(output, pack, chunk, k))
    columns = share_columns(strategy.state, local, plan, packs, results, 2 * k)
    fields = {"top_log_probs": columns[:, :k].contiguous(), "top_ids": columns[:, k:].to(torch.int32)}
    return strategy._require_finite(
        SampleBatch(local.ids, local.lengths, fields, dict.fromkeys(fields, FieldSpec("next_token")))
    )


# ---- a critic's first weights


@torch.no_grad()
def copy_trunk(policy: MegatronInferStrategy, critic: MegatronTrainStrategy) -> None:
    """Copies the policy's weights into the critic, whose value head stays. Collective.

    Raises `LayoutError` on all ranks for another layout, or parameters that the policy does not have.
    """
    policy.gather_parameters()
    critic.gather_parameters()
    with critic.layout.team.agree("copying the policy's weights to the critic"):
        if policy.layout.dims != critic.layout.dims or not has_same_stages(policy.state, critic.state):
            raise LayoutError("the policy and the critic have different parallel layouts: give both the same")
        pairs = [pair for chunks in zip(policy.chunks, critic.chunks, strict=True) for pair in _pairs(*chunks)]
    for source, target in pairs:
        target.copy_(source)
    if critic.optimizer is not None:
        critic.optimizer.reload_model_params()  # else its next step would undo the copy from its fp32 copies


def _pairs(policy_chunk: Any, critic_chunk: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of a tensor of the policy's chunk and the tensor of the critic's chunk that receives it."""
    policy, critic = gpt_of(policy_chunk), gpt_of(critic_chunk)
    sources = dict((*policy.named_parameters(), *expert_biases(policy)))
    targets = {name: x for name, x in (*critic.named_parameters(), *expert_biases(critic)) if name != VALUE_HEAD}
    wrong = [name for name, x in targets.items() if name not in sources or sources[name].shape != x.shape]
    if wrong:
        raise LayoutError(f"{wrong[0]} of the critic is not in the policy: give both the same architecture")
    return [(sources[name], target) for name, target in targets.items()]
