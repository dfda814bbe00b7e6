"""A job of another framework in our terms: `ForeignJob`, which its reader fills, and `write_job`, which writes it.

Every value comes as `Given`, with its key in the file. This module writes settings that several keys of a file decide
together; keys that only have another name here are moved by the data file (`foreign_file`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from roll_batching.jobs.config.diagnostics import KeyPath
from roll_batching.tools.conversion.critics import Critic, write_critic
from roll_batching.tools.conversion.draft import Draft
from roll_batching.tools.conversion.foreign_file import DATA, HELD_OUT, LAYOUT, PACKING, ROLE, TRAIN, Given, section_at

_ESTIMATORS = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
"""Name in `loss_args.kl_estimator` of an estimator of KL, where the two names differ."""


@dataclass(frozen=True)
class Devices:
    """Devices of training and of the engine that samples."""

    training: Given
    """Number of devices that train."""
    engine: Given | None = None
    """Number of devices that only sample, which follow those that train."""
    sleeps: str = ""
    """Key of the file by which the engine shares the devices of training, and sleeps during training."""
    machines: int = 1
    """Machines on which engines run."""


@dataclass(frozen=True)
class Batch:
    """Sequences of an optimizer step and of a micro-batch."""

    devices: int
    sequences: Given
    """Sequences of an optimizer step on all ranks."""
    rows: Given
    """Sequences of a micro-batch without packs."""
    packs: Given | None = None
    """Whether micro-batches are packs; None: the reader has written how micro-batches are made."""
    cap: Given | None = None
    """Most tokens of a pack on each of its context-parallel ranks."""
    forward_cap: Given | None = None
    """`cap` of passes without gradient."""
    forward_rows: Given | None = None
    """`rows` of passes without gradient."""
    padding: str = ""
    """How padded micro-batches differ from those of the framework."""


@dataclass(frozen=True)
class Schedule:
    """The learning rate, in units of several optimizer steps."""

    updates: int = 1
    """Optimizer steps of a unit."""
    unit: str = ""
    """Name of a unit."""
    shape: Given | None = None
    lowest: Given | None = None
    start: Given | None = None
    """The learning rate at the beginning of the warm-up."""
    warmup: Given | None = None
    warmup_ratio: Given | None = None
    length: Given | None = None
    """Units that the schedule spans; None: those of the job."""


@dataclass(frozen=True)
class Lengths:
    """Most tokens of samples."""

    whole: Given | None = None
    prompt: Given | None = None
    response: Given | None = None
    drops: Given | None = None
    """What happens to longer prompts (`data_args.long_prompts`)."""


@dataclass(frozen=True)
class Clipping:
    """Bounds of the ratio to the old policy."""

    switch: str
    """Key of the file that enables the bounds."""
    low: Given | None = None
    high: Given | None = None
    dual: Given | None = None


@dataclass(frozen=True)
class KlTerm:
    """KL to a reference, in the loss or in the rewards of tokens."""

    switch: str
    """Key of the file that enables the term."""
    weight: Given
    estimator: Given | None = None
    gradient: Given | None = None
    bound: Given | None = None
    in_reward: bool = False


@dataclass(frozen=True)
class DynamicSampling:
    """Replacement of groups with equal rewards by other groups."""

    switch: Given
    most: Given | None = None
    """Most batches that are sampled for one step."""
    size: Given | None = None
    """Prompts of one of these batches."""


@dataclass(frozen=True)
class Evaluation:
    """The evaluation on held-out records."""

    period: Given
    """Steps between evaluations; below 1: evaluations only before the first and after the last step."""
    is_on: bool = True
    files: Given | None = None
    samples: Given | None = None
    answers: Given | None = None
    """Answers to a prompt."""
    sampling: Mapping[str, Given | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Heads:
    """Heads of multi-token prediction."""

    number: Given
    detached: Given
    """Whether their gradients stop before the model."""
    factor: Given | None = None
    """Weight of their loss."""


@dataclass(frozen=True)
class ForeignJob:
    """The parts of a job that several keys of its file decide."""

    task: Given | None = None
    devices: Devices | None = None
    batch: Batch | None = None
    schedule: Schedule | None = None
    lengths: Lengths | None = None
    clipping: Clipping | None = None
    kl: tuple[KlTerm, ...] = ()
    sampling: DynamicSampling | None = None
    evaluation: Evaluation | None = None
    heads: Heads | None = None
    critic: Critic | None = None


def write_job(job: ForeignJob, draft: Draft) -> None:
    """Puts the parts of `job` into `draft`, which must have the parallel sizes already: counts depend on them."""
    _put(draft, {("task",): job.task})
    if job.devices is not None:
        _write_devices(job.devices, draft)
    if job.batch is not None:
        _write_batch(job.batch, draft)
    if job.schedule is not None:
        _write_schedule(job.schedule, draft)
    if job.lengths is not None:
        lengths = (job.lengths.whole, job.lengths.prompt, job.lengths.response)
        names = ("sequence_length", "prompt_length", "response_length")
        _put(draft, {(name,): length for name, length in zip(names, lengths, strict=True)})
        _put(draft, {(*DATA, "long_prompts"): job.lengths.drops})
    if job.clipping is not None:
        clipping, dual = job.clipping, job.clipping.dual
        if clipping.low is not None or clipping.high is not None:
            switch = Given(True, clipping.switch)
            _put(
                draft,
                {("use_pg_clip_range",): switch, ("pg_clip_low",): clipping.low, ("pg_clip_high",): clipping.high},
            )
        if dual is not None:
            _put(draft, {("dual_clip_loss",): Given(True, dual.key), ("dual_clip_ratio",): dual})
    for term in job.kl:
        _write_kl(term, draft)
    if job.sampling is not None:
        most, size = ("dynamic_sampling_max_batches",), ("dynamic_sampling_batch_size",)
        _put(draft, {("dynamic_sampling",): job.sampling.switch, most: job.sampling.most, size: job.sampling.size})
    if job.evaluation is not None:
        _write_evaluation(job.evaluation, draft, supervised=job.task is not None and job.task.value in ("sft", "dpo"))
    if job.heads is not None:
        _put(draft, {(*LAYOUT, "mtp_num_layers"): job.heads.number, (*LAYOUT, "mtp_detach_heads"): job.heads.detached})
        _put(draft, {(*LAYOUT, "mtp_loss_scaling_factor"): job.heads.factor})
    if job.critic is not None:
        write_critic(job.critic, draft)


def _put(draft: Draft, values: Mapping[KeyPath, Given | None]) -> None:
    for path, given in values.items():
        if given is not None:
            draft.put(path, given.value, given.key, given.meaning)


def _write_devices(devices: Devices, draft: Draft) -> None:
    """Write `device_mapping` of both roles and the offload flag.

    A file for several machines does not name the servers on them: `engine_args.urls` is then listed as missing.
    """
    training_gpus, engine_gpus = devices.training, devices.engine
    training_range = f"list(range(0,{training_gpus.value}))"
    draft.put((ROLE, "device_mapping"), training_range, origin=training_gpus.key, meaning=training_gpus.meaning)
    if engine_gpus is not None:
        engine_range = f"list(range({training_gpus.value},{training_gpus.value + engine_gpus.value}))"
        meaning = "numbered after those that train"
        draft.put(("actor_infer", "device_mapping"), engine_range, origin=engine_gpus.key, meaning=meaning)
    if devices.sleeps:
        meaning = "the engine sleeps during training, and the model's states are offloaded during sampling"
        draft.put(("is_offload_states",), True, origin=devices.sleeps, meaning=meaning)
    if devices.machines > 1:
        reason = f"the file is for {devices.machines} machines, but the job starts servers only on that of rank 0"
        draft.missing.append(
            f"actor_infer.engine_args.urls: is missing: {reason}; start them on the others yourself, and name all"
        )


def _write_batch(batch: Batch, draft: Draft) -> None:
    """Writes packs or padded micro-batches, and accumulates micro-batches to the sequences of an optimizer step."""
    layout, rows = section_at(draft.values, *LAYOUT), batch.rows
    context = context_ranks(layout)
    if batch.packs is not None and batch.packs.value:
        if rows.value is not None:
            draft.leave_out(rows.key, "idle", "packs have no fixed number of rows")
        rows = Given(1, batch.packs.key)
        draft.put((ROLE, "use_sequence_packing"), True, batch.packs.key)
        text = "the tokens of a pack on all context-parallel ranks together" if context > 1 else ""
        for name, cap in (("train", batch.cap), ("forward", batch.forward_cap)):
            if cap is not None:
                meaning = "; ".join(filter(None, (cap.meaning, text)))
                draft.put((*PACKING, f"max_packed_sequence_length_{name}"), cap.value * context, cap.key, meaning)
    elif batch.packs is not None:
        draft.put((ROLE, "padded_length"), "longest", rows.key, batch.padding)
        _put(draft, {(ROLE, "infer_batch_size"): batch.forward_rows})
        for cap in (batch.cap, batch.forward_cap):
            if cap is not None:
                draft.leave_out(cap.key, "idle", f"{batch.packs.key.rpartition('.')[2]} is off")
    draft.put((*TRAIN, "per_device_train_batch_size"), rows.value, rows.key, rows.meaning)
    total, each, ranks = batch.sequences.value, rows.value, data_parallel_ranks(layout, batch.devices)
    if isinstance(total, int) and isinstance(each, int):
        steps, rest = divmod(total, each * ranks)
        meaning = f"{total} sequences per optimizer step are {each} x this x {ranks} data-parallel ranks"
        if rest or not steps:
            meaning = f"{total} sequences per step do not divide by {each} x {ranks} ranks: {max(1, steps)} is near"
        draft.put((*TRAIN, "gradient_accumulation_steps"), max(1, steps), batch.sequences.key, meaning)


def _write_schedule(schedule: Schedule, draft: Draft) -> None:
    for name, count in (("warmup_steps", schedule.warmup), ("max_steps", schedule.length)):
        if count is not None:
            steps, meaning = optimizer_steps(count.value, schedule.updates, schedule.unit)
            draft.put((*TRAIN, name), steps, count.key, "; ".join(filter(None, (count.meaning, meaning))))
    values = {"lr_scheduler_type": schedule.shape, "min_lr": schedule.lowest, "lr_warmup_init": schedule.start}
    values["warmup_ratio"] = schedule.warmup_ratio
    _put(draft, {(*TRAIN, name): value for name, value in values.items()})


def _write_kl(term: KlTerm, draft: Draft) -> None:
    switch, weight, estimator = Given(True, term.switch), term.weight, term.estimator
    draft.put(("reference",), {}, term.switch)
    if term.in_reward:
        _put(draft, {("add_token_level_kl",): switch, ("init_kl_coef",): weight, ("kl_penalty",): estimator})
        return
    _put(draft, {("use_kl_loss",): switch, ("kl_loss_coef",): weight, ("kl_loss_bound",): term.bound})
    if estimator is not None:
        name = _ESTIMATORS.get(str(estimator.value), estimator.value)
        draft.put(("loss_args", "kl_estimator"), name, estimator.key, estimator.meaning)
    _put(draft, {("loss_args", "kl_gradient"): term.gradient})


def _write_evaluation(evaluation: Evaluation, draft: Draft, *, supervised: bool) -> None:
    period = evaluation.period
    if not evaluation.is_on:
        draft.put(("eval_samples",), 0, period.key, "there is no evaluation")
        return
    meaning = "the policy is also evaluated before the first step and after the last"
    meaning = "the first and the last step are evaluated, too" if supervised else meaning
    draft.put(("eval_steps",), max(0, period.value or 0), period.key, meaning)
    _put(draft, {("eval_samples",): evaluation.samples, (*DATA, "eval_file_name"): evaluation.files})
    for name, value in evaluation.sampling.items():
        if value is not None and name == "temperature" and not value.value:
            draft.put((*HELD_OUT, "do_sample"), False, value.key)
        else:
            _put(draft, {(*HELD_OUT, name): value})
    if evaluation.answers is not None and evaluation.answers.value != 1:
        _put(draft, {(*HELD_OUT, "num_return_sequences"): evaluation.answers})


# ---- counts


def data_parallel_ranks(layout: Mapping[str, Any], devices: int) -> int:
    """Data-parallel ranks of `devices` devices in a layout with the sizes of Megatron; at least 1."""
    tp, pp = (layout.get(f"{name}_parallel_size") or 1 for name in ("tensor_model", "pipeline_model"))
    return max(1, devices // max(1, tp * pp * context_ranks(layout)))


def context_ranks(layout: Mapping[str, Any]) -> int:
    """Context-parallel ranks of a replica; 1 where each pack has its own size."""
    size = layout.get("context_parallel_size") or 1
    return 1 if size == "auto" else int(size)


def optimizer_steps(count: Any, each: int, unit: str) -> tuple[Any, str]:
    """Converts `count` of another framework's units to optimizer steps, `each` per unit; returns (steps, note).

    The note shows the calculation, and is empty if there is none. A `count` that is no integer is returned unchanged:
    the loader reports it.
    """
    if not isinstance(count, int) or isinstance(count, bool) or each == 1:
        return count, ""
    text = f"{count} x {each} optimizer steps of {unit}"
    return count * each, text if count else ""
