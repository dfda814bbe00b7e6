"""Frozen models on the ranks of training: the reference, and the teacher of distillation."""

from __future__ import annotations

import time
from collections.abc import Sequence

from roll_batching.jobs.config import JobConfig
from roll_batching.jobs.config.objective_rules import wants_reference
from roll_batching.jobs.config.task_rules import uses_teacher
from roll_batching.jobs.observe.run_files import Metrics
from roll_batching.jobs.steps.passes import add_results, prefix_errors
from roll_batching.losses.distillation import TEACHER_IDS, TEACHER_LOG_PROBS
from roll_batching.samples import SampleBatch
from roll_batching.strategy import MegatronInferStrategy
from roll_batching.strategy.offload import OffloadStats
from roll_batching.strategy.roles import run_on, top_log_probs


def make_reference(config: JobConfig, policy: MegatronInferStrategy) -> MegatronInferStrategy | None:
    """Makes the reference, a copy of `policy` with its present weights; None if the job needs none. Collective."""
    if config.reference is None or not wants_reference(config):
        return None
    if policy.state.adapters is not None:
        from roll_batching.strategy.roles import BaseReference  # few jobs have adapters

        return BaseReference(policy, config.reference)
    reference = MegatronInferStrategy(config.reference, seed=config.seed, temperature=policy.temperature)
    with prefix_errors("reference"):
        reference.initialize(weights=False)
        reference.copy_weights_from(policy)
    return reference


# ---- teacher


class Teacher:
    """The teacher's model in its own parallel layout, from its model directory. Building it is collective.

    `teacher_temperature` divides its logits; the loss divides by `kd_temperature`, for the student as well.
    """

    def __init__(self, config: JobConfig, student: MegatronInferStrategy) -> None:
        assert config.teacher is not None and config.teacher.model_args.architecture is not None
        self._student, self._offloads = student, config.is_offload_states
        self.strategy = MegatronInferStrategy(config.teacher, seed=config.seed, temperature=config.teacher_temperature)
        with prefix_errors("teacher"):
            self.strategy.initialize()
        self._k = config.logits_topk or config.teacher.model_args.architecture.vocab_size
        self.seconds = 0.0
        """Seconds of the last call of `add_fields`."""
        if self._offloads:
            self.strategy.offload_states("parameters")

    def add_fields(self, batch: SampleBatch, masks: Sequence[str]) -> SampleBatch:
        """Adds the teacher's tokens to `batch`, which is in the student's layout; see `with_top_tokens`. Collective."""
        started = time.perf_counter()
        with prefix_errors("teacher"), self.strategy.loaded("parameters"):
            batch = with_top_tokens(self._student, self.strategy, batch, self._k, masks)
        self.seconds = time.perf_counter() - started
        return batch

    def metrics(self) -> Metrics:
        """Metrics of the last step."""
        return {"teacher_seconds": self.seconds}

    @property
    def offload_stats(self) -> OffloadStats:
        """Bytes of the teacher's weights moved between device and host so far, and the seconds that it took."""
        return self.strategy.offload_stats


def with_top_tokens(
    student: MegatronInferStrategy,
    teacher: MegatronInferStrategy,
    batch: SampleBatch,
    k: int,
    masks: Sequence[str],
) -> SampleBatch:
    """Adds the teacher's `k` most likely tokens to `batch`, which is in the student's layout. Collective.

    The teacher computes them in its own layout and plan. The fields `teacher_log_probs` and `teacher_ids` are
    next_token, [tokens, k].
    """
    results = run_on(
        teacher,
        batch.only(("input_ids", *masks)),
        lambda samples, plan: top_log_probs(teacher, samples, plan, k, masks),
        home=student,
    )
    return add_results(batch, results, {"top_log_probs": TEACHER_LOG_PROBS, "top_ids": TEACHER_IDS})


def teacher_of(config: JobConfig, student: MegatronInferStrategy) -> Teacher | None:
    """Makes the teacher of a job whose loss reads one, else returns None. Collective."""
    return Teacher(config, student) if uses_teacher(config) else None
