"""NeMo-RL's sequence packing, dynamic batching and batch sizes as the batching keys of actor_train."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roll_batching.errors import ConfigError, PlanError
from roll_batching.integrations.nemo_rl_names import microbatch_order
from roll_batching.tools.conversion.foreign_file import ForeignFile
from roll_batching.tools.conversion.mini_batch import data_parallel_ranks, put_mini_batch

_PACKING, _DYNAMIC = "sequence_packing", "dynamic_batching"
_ORIGINS: Mapping[tuple[str, ...], str] = {
    ("use_sequence_packing",): f"{_PACKING}.enabled",
    ("sequence_packing_args", "algorithm"): f"{_PACKING}.algorithm",
    ("sequence_packing_args", "max_packed_sequence_length_train"): f"{_PACKING}.train_mb_tokens",
    ("sequence_packing_args", "max_packed_sequence_length_forward"): f"{_PACKING}.logprob_mb_tokens",
    ("use_dynamic_batching_in_train",): f"{_DYNAMIC}.enabled",
    ("use_dynamic_batching_in_infer",): f"{_DYNAMIC}.enabled",
    ("max_tokens_per_microbatch_in_train",): f"{_DYNAMIC}.train_mb_tokens",
    ("max_tokens_per_microbatch_in_infer",): f"{_DYNAMIC}.logprob_mb_tokens",
    ("sequence_length_round_in_train",): f"{_DYNAMIC}.sequence_length_round",
    ("sequence_length_round_in_infer",): f"{_DYNAMIC}.sequence_length_round",
    ("planning_args", "dynamic_algorithm"): f"{_DYNAMIC}.enabled",
    ("planning_args", "shared_shapes"): f"{_DYNAMIC}.enabled",
}
"""By key of actor_train that `convert_policy` writes, the key of `policy` that it comes from."""


def convert_batching(file: ForeignFile, source: str, task: str) -> None:
    """Converts `policy.sequence_packing`, `policy.dynamic_batching` and the batch sizes of `policy`."""
    policy = file.peek("policy")
    try:
        worker, without_effect = convert_policy({key: _integers(value) for key, value in policy.items()})
    except PlanError as error:
        raise ConfigError(f"{source}: policy.{error}") from None
    layout = file.draft.values["actor_train"].get("strategy_args", {}).get("strategy_config", {})
    for key, value in worker.items():
        file.draft.put(("actor_train", key), value)
    key = f"policy.{_PACKING}.microbatch_order"
    if file.peek(key) == "largest_first" and layout.get("pipeline_model_parallel_size", 1) != 1:
        text = "micro-batches of a pipeline run in the order of the smallest predicted step time"
        file.draft.leave_out(key, "refused", text)
    for path, name in _ORIGINS.items():
        file.draft.origins[("actor_train", *path)] = f"policy.{name}"
    for name, why in without_effect.items():
        file.draft.leave_out(f"policy.{name}", "idle", why)
    for name in (_PACKING, _DYNAMIC, "make_sequence_length_divisible_by"):
        file.take(f"policy.{name}")
    _batch_sizes(file, layout, task)


def _batch_sizes(file: ForeignFile, layout: Mapping[str, Any], task: str) -> None:
    """Global, micro- and log-prob batch sizes; of pairs, in sequences."""
    devices = int(file.draft.values["actor_train"]["device_mapping"].rpartition(",")[2].rstrip(")"))
    size, rows = file.take("policy.train_global_batch_size"), file.take("policy.train_micro_batch_size", 1)
    text = ""
    if task == "dpo" and isinstance(size, int) and isinstance(rows, int):
        size, rows, text = 2 * size, 2 * rows, "counts sequences, two per pair; NeMo-RL counts pairs"
    whole, each = (size, "policy.train_global_batch_size"), (rows, "policy.train_micro_batch_size")
    put_mini_batch(file.draft, whole, each, data_parallel_ranks(layout, devices), text)
    file.move("policy.logprob_batch_size", ("actor_train", "infer_batch_size"))
    for name in ("generation_batch_size", "logprob_chunk_size", "offload_optimizer_for_logprob"):
        if file.take(f"policy.{name}") is not None:
            text = "roles share one model; infer_batch_size is the size of passes without gradient"
            file.draft.leave_out(f"policy.{name}", "idle", text)


def steps_of_a_rollout(file: ForeignFile, section: str, size: Any = None) -> int:
    """Optimizer steps of one pass over the samples of a rollout.

    `section` has their number, and mini-batches have `size` samples (default: the policy's).
    """
    size = file.peek("policy.train_global_batch_size") if size is None else size
    numbers = [file.peek(f"{section}.num_{name}") for name in ("prompts_per_step", "generations_per_prompt")]
    if not all(isinstance(number, int) and number > 0 for number in (*numbers, size)):
        return 1
    return max(1, int(numbers[0] * numbers[1]) // int(size))


def _integers(value: Any) -> Any:
    """Whole floats, results of a division such as `${div:...}`, as integers."""
    if isinstance(value, dict):
        return {key: _integers(below) for key, below in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value


def convert_policy(policy: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """(keys of actor_train for NeMo-RL's `policy` section; keys of it without effect here, each with the reason).

    Reads `sequence_packing`, `dynamic_batching` and `make_sequence_length_divisible_by`. Raises `PlanError` when both
    are enabled, and for a token budget that is missing or no number (such as an unresolved `${mul:...}`).
    """
    packing, dynamic = _section(policy, _PACKING), _section(policy, _DYNAMIC)
    use_packing = bool(packing.pop("enabled", False))
    use_dynamic = bool(dynamic.pop("enabled", False))
    if use_packing and use_dynamic:
        raise PlanError("sequence_packing and dynamic_batching are both enabled; enable one of them")
    without_effect: dict[str, str] = {}
    result: dict[str, Any] = {"use_sequence_packing": use_packing}
    if use_packing:
        train, forward = _budgets(_PACKING, packing)
        result["sequence_packing_args"] = {
            "algorithm": packing.pop("algorithm", "modified_first_fit_decreasing"),
            "max_packed_sequence_length_train": train,
            "max_packed_sequence_length_forward": forward,
        }
        if packing.pop("sequence_length_round", None) is not None:
            text = "NeMo-RL never reads it; here packs are aligned as the parallel layout needs"
            without_effect[f"{_PACKING}.sequence_length_round"] = text
        if microbatch_order(packing.pop("microbatch_order", None)) == "largest_first":
            text = "a rank's micro-batches run by falling cost, which is largest first"
            without_effect[f"{_PACKING}.microbatch_order"] = text
        without_effect |= {f"{_PACKING}.{key}": "has no counterpart" for key in sorted(packing)}
    if use_dynamic:
        train, forward = _budgets(_DYNAMIC, dynamic)
        result |= {
            "use_dynamic_batching_in_train": True,
            "max_tokens_per_microbatch_in_train": train,
            "use_dynamic_batching_in_infer": True,
            "max_tokens_per_microbatch_in_infer": forward,
            "planning_args": {"dynamic_algorithm": "nemo_rl", "shared_shapes": True},
        }
        multiple = dynamic.pop("sequence_length_round", None)
        if multiple is not None:
            multiple = _whole_number(f"{_DYNAMIC}.sequence_length_round", multiple)
            result["sequence_length_round_in_train"] = result["sequence_length_round_in_infer"] = multiple
        without_effect |= {f"{_DYNAMIC}.{key}": "has no counterpart" for key in sorted(dynamic)}
    if policy.get("make_sequence_length_divisible_by") is not None:
        text = "alignment follows from TP, CP, sequence parallelism and precision"
        without_effect["make_sequence_length_divisible_by"] = text
    return result, without_effect


def _budgets(section: str, values: dict[str, Any]) -> tuple[int, int]:
    """Tokens of a micro-batch in training, and without gradient."""
    if values.get("train_mb_tokens") is None:
        raise PlanError(f"{section}.train_mb_tokens is missing; it is the cap of a micro-batch in tokens")
    train = _whole_number(f"{section}.train_mb_tokens", values.pop("train_mb_tokens"))
    forward = values.pop("logprob_mb_tokens", None)
    return train, train if forward is None else _whole_number(f"{section}.logprob_mb_tokens", forward)


def _section(policy: Mapping[str, Any], name: str) -> dict[str, Any]:
    section = policy.get(name) or {}
    if not isinstance(section, Mapping):
        raise PlanError(f"{name} is {section!r}; it is a section of keys and values")
    return dict(section)


def _whole_number(key: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise PlanError(f"{key} is {value!r}; write a whole number of tokens, at least 1")
    return value
