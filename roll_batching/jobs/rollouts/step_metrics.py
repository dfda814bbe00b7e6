"""Makes columns of metrics.jsonl: of optimizer steps, of rollouts, and of tokens under other batching modes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from roll_batching.errors import LossError
from roll_batching.jobs.config import WorkerConfig
from roll_batching.jobs.observe.run_files import Metrics
from roll_batching.jobs.rollouts.rollout import StepScores
from roll_batching.losses.contract import HostMetric, as_numbers, join_parts
from roll_batching.planning import ParallelDims, Plan, PlanConstraints, plan_step
from roll_batching.strategy import StepResult
from roll_batching.strategy.offload import OffloadStats

_RESERVED = ("step", "phase")
"""Columns that identify a row."""


def update_metrics(updates: Sequence[tuple[Plan, StepResult]]) -> Metrics:
    """Joins the metrics of one or several optimizer steps, each over the steps by its kind.

    They include the loss's own metrics: a `Mean` is taken over the tokens of all steps, a `Max` over all steps.
    """
    step_metrics = join_parts(_step_metrics(plan, result) for plan, result in updates)
    loss_metrics = join_parts(result.joined_metrics for _, result in updates)
    _, last = updates[-1]
    scale = {} if last.loss_scale is None else {"loss_scale": last.loss_scale}
    return merge_metrics(as_numbers(step_metrics), {"lr": last.lr}, scale, as_numbers(loss_metrics))


def _step_metrics(plan: Plan, result: StepResult) -> dict[str, HostMetric]:
    report = plan.report
    metrics = {
        "loss": HostMetric("mean", (result.loss, 1)),
        "grad_norm": HostMetric("mean", (result.grad_norm, 1)),
        "tokens": HostMetric("sum", (report.real_tokens,)),
        "computed_tokens": HostMetric("sum", (report.computed_tokens,)),
        "shared_tokens": HostMetric("sum", (report.shared_tokens,)),
        "train_seconds": HostMetric("sum", (result.seconds,)),
        "tokens_per_second": HostMetric("mean", (report.real_tokens, result.seconds)),
        "padding_share": HostMetric("mean", (report.padding_tokens, report.computed_tokens)),
        "imbalance": HostMetric("mean", (report.imbalance, 1)),
        "row_imbalance": HostMetric("mean", (_row_imbalance(plan), 1)),
        "tokens_per_row": HostMetric("mean", (report.computed_tokens, len(plan.tokens))),
        "micro_batches": HostMetric("sum", (report.num_micro_batches,)),
        "fillers": HostMetric("sum", (report.fillers,)),
        **{f"{phase}_seconds": HostMetric("sum", (seconds,)) for phase, seconds in result.phases.items()},
    }
    if (ratio := result.predicted_over_measured) is not None:
        metrics["predicted_over_measured"] = HostMetric("mean", (ratio, 1))
    if result.flops is not None and result.unshared_flops is not None:
        seconds = result.seconds * result.ranks
        metrics["flops_per_second"] = HostMetric("mean", (result.flops, seconds))
        metrics["unshared_flops_per_second"] = HostMetric("mean", (result.unshared_flops, seconds))
        if result.device_rate is not None:
            metrics["mfu"] = HostMetric("mean", (result.flops, seconds * result.device_rate))
    return metrics


def _row_imbalance(plan: Plan) -> float:
    """(largest - smallest) / mean cost among the ranks at an index, on average over the micro-batches."""
    costs = plan.by_rank(plan.costs)
    return float(np.mean((costs.max(axis=0) - costs.min(axis=0)) / np.maximum(costs.mean(axis=0), 1)))


def comparison_metrics(tokens: Iterable[Mapping[str, int]]) -> Metrics:
    """Tokens that each batching mode would compute, summed over optimizer steps; `tokens` is by mode for each step."""
    parts = ({f"tokens_{mode}": HostMetric("sum", (count,)) for mode, count in step.items()} for step in tokens)
    return dict(as_numbers(join_parts(parts)))


def score_metrics(scores: StepScores) -> Metrics:
    """Metrics of the step's rollouts and rewards."""
    return {
        "reward": float(scores.rewards.mean()),
        "reward_std": float(scores.rewards.std()),
        **{f"reward/{name}": mean for name, mean in mean_reward_by_domain(scores).items()},
        "reward_failures": int(scores.failed.sum()),
        **rollout_metrics(scores),
        **{f"mark/{name}": float(mark.mean()) for name, mark in scores.marks.items()},
    }


def rollout_metrics(scores: StepScores) -> Metrics:
    """Metrics of the step's rollouts, without those of rewards."""
    return {
        "generate_seconds": float(scores.generate_seconds.mean()),
        "reward_seconds": float(scores.reward_seconds.mean()),
        "response_length_mean": float(scores.response_tokens.mean()),
        "response_length_max": int(scores.response_tokens.max()),
        "length_max_over_mean": float(scores.lengths.max() / scores.lengths.mean()),
        "finished_share": float(scores.finished.mean()),
    }


def time_share_metrics(metrics: Metrics, *, asynchronous: bool) -> Metrics:
    """Shares of the step's `seconds`: rollout, reward, transfer of weights, training, and waiting.

    Transfer includes an engine's time to sleep and wake up where it shares devices with training. Waiting is the time
    of rank 0's rollouts beyond the replicas' mean; in an `asynchronous` job all of the rollouts' time is. The rest, up
    to 1, is evaluation and work between the phases.
    """
    seconds, rollouts = metrics["seconds"], metrics["rollout_seconds"]
    transfer = metrics.get("weights_seconds", 0.0) + metrics.get("engine_sleep_seconds", 0.0)
    if asynchronous:
        # Weights are sent after the optimizer steps, inside update_seconds.
        parts = {"train": metrics["update_seconds"] - transfer, "wait": rollouts}
    else:
        generate, reward = metrics["generate_seconds"], metrics["reward_seconds"]
        wait = max(0.0, rollouts - transfer - generate - reward)
        parts = {"rollout": generate, "reward": reward, "train": metrics["update_seconds"], "wait": wait}
    return {f"share/{name}": part / seconds for name, part in {**parts, "transfer": transfer}.items()}


def mean_reward_by_domain(scores: StepScores) -> dict[str, float]:
    """Mean rewards by domain; empty where the job has one reward."""
    return {
        str(name): float(scores.rewards[scores.domains == name].mean()) for name in np.unique(scores.domains) if name
    }


def merge_metrics(*parts: Metrics) -> Metrics:
    """One row of all columns. Raises LossError when two parts share a name: only a loss chooses its own."""
    merged: Metrics = {}
    for part in parts:
        duplicates = [name for name in part if name in merged or name in _RESERVED]
        if duplicates:
            raise LossError(
                f"the loss reports a metric named {duplicates[0]!r}, which the run records itself: give it another name"
            )
        merged |= part
    return merged


def offload_metrics(before: OffloadStats, after: OffloadStats) -> Metrics:
    """Bytes moved between devices and host from `before` to `after`, and their seconds, on the rank that records."""
    return {"offload_bytes": after.bytes - before.bytes, "offload_seconds": after.seconds - before.seconds}


# ---- comparison


class ModeComparison:
    """Counts the tokens that each batching mode would compute, under the settings that `role` has for that mode.

    A mode without a cap takes the cap of the mode that runs.
    """

    def __init__(self, role: WorkerConfig, dims: ParallelDims, *, sequence_length: int) -> None:
        cap = (
            role.batching().train.max_tokens
            or role.sequence_packing_args.max_packed_sequence_length_train
            or role.max_tokens_per_microbatch_in_train
            or role.training_args.per_device_train_batch_size * sequence_length
        )
        packing = role.sequence_packing_args
        packed_cap = packing.max_packed_sequence_length_train or cap
        self._full = sequence_length
        planning = role.planning_args
        if planning.oversize == "error":  # samples fit the running mode's cap, which may be larger
            planning = planning.model_copy(update={"oversize": "alone"})
        off: dict[str, Any] = {
            "planning_args": planning,
            "use_sequence_packing": False,
            "use_dynamic_batching": None,
            "use_dynamic_batching_in_train": False,
        }
        variants: dict[str, dict[str, Any]] = {
            "dynamic": off
            | {
                "use_dynamic_batching_in_train": True,
                "max_tokens_per_microbatch_in_train": role.max_tokens_per_microbatch_in_train or cap,
            },
            "packed": off
            | {
                "use_sequence_packing": True,
                "sequence_packing_args": packing.model_copy(update={"max_packed_sequence_length_train": packed_cap}),
            },
        }
        multiple = role.strategy_args.strategy_config.pack_multiple
        self._constraints = {
            mode: PlanConstraints.of(dims, role.model_copy(update=changes).batching().train, pack_multiple=multiple)
            for mode, changes in variants.items()
        }

    def tokens(self, lengths: np.ndarray) -> dict[str, int]:
        """Computed tokens of all ranks by mode, for one mini-batch with `lengths`, int64 `[n]`.

        Modes: `full` (all rows padded to the sequence length), `padded` (to the longest sample), `dynamic`, `packed`.
        """
        planned = {
            mode: plan_step(lengths, constraints).report.computed_tokens
            for mode, constraints in self._constraints.items()
        }
        count = len(lengths)
        return {"full": count * self._full, "padded": count * int(lengths.max()), **planned}
