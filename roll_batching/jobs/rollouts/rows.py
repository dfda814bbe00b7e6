"""Rows of metrics.jsonl: figures of optimizer steps, joined by their kind, and of rollouts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from roll_batching.errors import LossError
from roll_batching.jobs.observe.metrics_file import Row
from roll_batching.jobs.rollouts.rollout import StepScores
from roll_batching.jobs.steps.update import Update
from roll_batching.losses.metric_kinds import HostMetric, as_numbers, join_parts
from roll_batching.planning import Plan
from roll_batching.strategy.offload import Moved

_PLACE = ("step", "phase")
"""Columns that say which row it is."""


def update_row(updates: Sequence[Update]) -> Row:
    """A row's figures of one or several optimizer steps, each joined over the steps by its kind.

    The loss's own metrics among them: a `Mean` is one over all steps' tokens, a `Max` the largest of all.
    """
    figures = join_parts(_figures(update) for update in updates)
    reported = join_parts(update.result.joined_metrics for update in updates)
    return merged(as_numbers(figures), {"lr": updates[-1].result.lr}, as_numbers(reported))


def _figures(update: Update) -> dict[str, HostMetric]:
    result, report = update.result, update.plan.report
    padding = report.computed_tokens - report.real_tokens
    found = {
        "loss": HostMetric("mean", (result.loss, 1)),
        "grad_norm": HostMetric("mean", (result.grad_norm, 1)),
        "tokens": HostMetric("sum", (report.real_tokens,)),
        "computed_tokens": HostMetric("sum", (report.computed_tokens,)),
        "train_seconds": HostMetric("sum", (result.seconds,)),
        "tokens_per_second": HostMetric("mean", (report.real_tokens, result.seconds)),
        "padding_share": HostMetric("mean", (padding, report.computed_tokens)),
        "imbalance": HostMetric("mean", (report.imbalance, 1)),
        "row_imbalance": HostMetric("mean", (_row_imbalance(update.plan), 1)),
        "tokens_per_row": HostMetric("mean", (report.computed_tokens, len(update.plan.tokens))),
        "micro_batches": HostMetric("sum", (report.num_micro_batches,)),
        "fillers": HostMetric("sum", (report.fillers,)),
        **{f"{phase}_seconds": HostMetric("sum", (spent,)) for phase, spent in result.phases.items()},
    }
    if result.flops is not None:
        found["flops_per_second"] = HostMetric("mean", (result.flops, result.seconds * result.ranks))
        if result.device_rate is not None:
            found["mfu"] = HostMetric("mean", (result.flops, result.seconds * result.ranks * result.device_rate))
    return found


def _row_imbalance(plan: Plan) -> float:
    """(largest - smallest) / mean cost among the ranks at an index, on average over the micro-batches."""
    costs = plan.costs.reshape(plan.constraints.dp_size, plan.num_micro_batches)
    return float(np.mean((costs.max(axis=0) - costs.min(axis=0)) / np.maximum(costs.mean(axis=0), 1)))


def comparison_row(tokens: Iterable[Mapping[str, int]]) -> Row:
    """What the row's optimizer steps would compute in each mode, given as `tokens` by mode of each step."""
    parts = ({f"tokens_{mode}": HostMetric("sum", (count,)) for mode, count in step.items()} for step in tokens)
    return dict(as_numbers(join_parts(parts)))


def score_row(scores: StepScores) -> Row:
    """A row's figures of the step's rollouts."""
    return {
        "reward": float(scores.rewards.mean()),
        "reward_std": float(scores.rewards.std()),
        **{f"reward/{name}": mean for name, mean in means_of_domains(scores).items()},
        "reward_failures": int(scores.failed.sum()),
        "generate_seconds": float(scores.generate_seconds.mean()),
        "reward_seconds": float(scores.reward_seconds.mean()),
        "response_length_mean": float(scores.response_tokens.mean()),
        "response_length_max": int(scores.response_tokens.max()),
        "length_max_over_mean": float(scores.lengths.max() / scores.lengths.mean()),
        "finished_share": float(scores.finished.mean()),
        **{f"mark/{name}": float(mark.mean()) for name, mark in scores.marks.items()},
    }


def timeline_row(row: Row, *, ahead: bool) -> Row:
    """Shares of the step's `seconds`: rollout, reward, transfer of weights, training, and waiting for others.

    An engine that sleeps while the model trains goes to sleep and wakes up within the transfer.

    Waiting is what rank 0's rollouts took beyond the replicas' mean. Where rollouts come from `ahead` of training, all
    that they took is. What is left to 1 are evaluations and what lies between.
    """
    whole, rollouts = row["seconds"], row["rollout_seconds"]
    transfer = row.get("weights_seconds", 0.0) + row.get("engine_sleep_seconds", 0.0)
    parts = {"rollout": row["generate_seconds"], "reward": row["reward_seconds"], "train": row["update_seconds"]}
    if ahead:
        parts = {"train": row["update_seconds"] - transfer, "wait": rollouts}
    else:
        parts["wait"] = max(0.0, rollouts - transfer - parts["rollout"] - parts["reward"])
    return {f"share/{name}": seconds / whole for name, seconds in {**parts, "transfer": transfer}.items()}


def means_of_domains(scores: StepScores) -> dict[str, float]:
    """Mean rewards by domain, where rewards have any."""
    return {
        str(name): float(scores.rewards[scores.domains == name].mean()) for name in np.unique(scores.domains) if name
    }


def merged(*parts: Row) -> Row:
    """One row of all columns. Raises LossError when two parts have one of the same name: the loss chose it."""
    row: Row = {}
    for part in parts:
        taken = [name for name in part if name in row or name in _PLACE]
        if taken:
            raise LossError(
                f"the loss reports a metric named {taken[0]!r}, as a column of the run's own is: give it another name"
            )
        row |= part
    return row


def offload_row(before: Moved, after: Moved) -> Row:
    """A row's figures of states that went to the host and back, on the rank that reports, both ways together."""
    return {"offload_bytes": after.bytes - before.bytes, "offload_seconds": after.seconds - before.seconds}
