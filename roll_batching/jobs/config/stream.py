"""cosmos-rl's load-balanced dynamic batching: `train` and `train.train_policy`, with its names and defaults."""

from __future__ import annotations

from typing import Any, Literal

from roll_batching.settings.fields import MOST_PROCESSES, Settings, Switch, setting

_STREAMS = Switch(lambda job: job.stream, "train.train_policy.enable_dp_load_balancing is false", of_job=True)
_READ_IF = {
    "*": _STREAMS,
    "load_balanced_batching_strategy": (
        _STREAMS,
        Switch(lambda job: not job.stream.sequence_packing, "sequence_packing takes every sample that fits", True),
    ),
}


class TrainPolicy(Settings, read_if=_READ_IF):
    """`train.train_policy`: how a stream of samples is batched."""

    enable_dp_load_balancing: bool = setting(
        False,
        help="task: sft or dpo: each data-parallel rank forms micro-batches from a pool of its samples, by length, up "
        "to a token cap. These keys then replace the batching keys of actor_train.",
    )
    load_balanced_pool_size: int = setting(32, help="Samples (dpo: pairs) that each rank chooses from.", ge=1)
    load_balanced_max_tokens_for_batch: int = setting(
        32768, help="Most tokens of a micro-batch, a hard cap: rows x longest, or packed the sum.", ge=1
    )
    load_balanced_batching_strategy: Literal["prefer_closest", "prefer_first"] = setting(
        "prefer_closest",
        help="Which sample joins, among those that enlarge the rectangle least: the one nearest in length "
        "(prefer_closest), or the oldest.",
    )
    load_balanced_batches_per_optimizer_step: int = setting(
        1, help="Micro-batches of an optimizer step that each rank forms.", ge=1
    )
    load_balanced_accumulate_steps: int | None = setting(
        None, help="Another name for load_balanced_batches_per_optimizer_step.", ge=1
    )
    load_balanced_across_ranks: bool = setting(
        False,
        help="Plan the samples of a step over all ranks (by actor_train's algorithm) instead of on each rank: equal "
        "cost on all ranks.",
    )
    dataloader_seed: int = setting(0, help="Seed of the order of the data.", ge=0)
    dataloader_num_workers: int = setting(
        0, help="Processes per rank that tokenise ahead. The stream does not depend on it.", ge=0, le=MOST_PROCESSES
    )
    infinite_loop: bool = setting(
        True,
        help="Begin the next epoch when the data ends. false: the job ends with the data; ranks whose data has ended "
        "compute fillers until all have.",
    )
    repartition: bool = setting(
        False,
        help="When resuming with another number of data-parallel ranks: distribute the unread samples over the new "
        "ranks. false: that is an error.",
    )


class TrainSection(Settings, read_if={"max_num_steps": _STREAMS}):
    """`train`: length and form of such a run."""

    max_num_steps: int | None = setting(
        None, help="Optimizer steps. Required with train_policy.enable_dp_load_balancing.", ge=1
    )
    sequence_packing: bool = setting(
        False, help="Pack samples end to end, in place of rectangles. Needs train_policy.enable_dp_load_balancing."
    )
    train_policy: TrainPolicy = setting(default_factory=TrainPolicy, help="How the stream is batched.")

    @property
    def batches_per_step(self) -> int:
        """Micro-batches of an optimizer step, by either name."""
        policy = self.train_policy
        return policy.load_balanced_accumulate_steps or policy.load_balanced_batches_per_optimizer_step

    @property
    def batching_keys(self) -> dict[str, Any]:
        """The same settings as batching keys of a role."""
        cap, packed = self.train_policy.load_balanced_max_tokens_for_batch, self.sequence_packing
        return {
            "use_sequence_packing": packed,
            "use_dynamic_batching": None,
            "use_dynamic_batching_in_train": not packed,
            "use_dynamic_batching_in_infer": not packed,
            "max_tokens_per_microbatch_in_train": None if packed else cap,
            "max_tokens_per_microbatch_in_infer": None,
        }
