"""From a role's settings to the batching of its passes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from roll_batching.errors import ConfigError, PlanError
from roll_batching.planning import BatchingSpec

if TYPE_CHECKING:
    from roll_batching.config.worker import WorkerConfig


def pass_batching(worker: WorkerConfig, kind: Literal["train", "infer"]) -> BatchingSpec:
    """The batching of `worker`'s passes with (`train`) or without (`infer`) gradient.

    Raises ConfigError when the mode's cap is missing.
    """
    try:
        return _spec(worker, kind)
    except PlanError as error:
        raise ConfigError(str(error)) from None


def _spec(worker: WorkerConfig, kind: Literal["train", "infer"]) -> BatchingSpec:
    train = kind == "train"
    planning = worker.planning_args
    if worker.use_sequence_packing:
        packing = worker.sequence_packing_args
        cap, least = packing.max_packed_sequence_length_train, packing.min_num_micro_batches_train
        if not train:
            cap = packing.max_packed_sequence_length_forward or cap
            least = packing.min_num_micro_batches_forward
        return BatchingSpec(
            mode="packed",
            # A forward-only role may give the forward cap alone.
            max_tokens=cap or packing.max_packed_sequence_length_forward,
            algorithm=packing.algorithm,
            min_num_micro_batches=least,
            sequence_multiple=planning.sequence_multiple,
            oversize=planning.oversize,
            objective=planning.objective,
            seed=planning.seed,
        )
    if worker.dynamic_in_train if train else worker.dynamic_in_infer:
        cap = worker.max_tokens_per_microbatch_in_train if train else worker.max_tokens_per_microbatch_in_infer
        step = worker.sequence_length_round_in_train if train else worker.sequence_length_round_in_infer
        return BatchingSpec(
            mode="dynamic",
            max_tokens=cap,
            algorithm=planning.dynamic_algorithm,
            sequence_length_round=step,
            shared_shapes=planning.shared_shapes,
            sequence_multiple=planning.sequence_multiple,
            oversize=planning.oversize,
            objective=planning.objective,
            seed=planning.seed,
        )
    return BatchingSpec(
        mode="padded",
        rows=worker.training_args.per_device_train_batch_size if train else worker.infer_batch_size,
        padded_length=None if worker.padded_length == "longest" else worker.padded_length,
        sequence_multiple=planning.sequence_multiple,
        oversize=planning.oversize,
        objective=planning.objective,
        seed=planning.seed,
    )
