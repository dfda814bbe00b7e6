"""Rehearse one rank: build its part of the model, run the passes of a step, and report on them and their memory."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.distributed import get_rank

from roll_batching.jobs.config import JobConfig
from roll_batching.jobs.config.auto_caps import with_value
from roll_batching.settings.megatron_config import SPLIT_KEYS
from roll_batching.tools.rehearsal import fake_cuda, fake_world
from roll_batching.tools.rehearsal.fake_world import assume_balanced_routing, routing_notes
from roll_batching.tools.rehearsal.passes import Passes, is_rl, passes_of
from roll_batching.tools.rehearsal.recorder import Block, Recorder
from roll_batching.tools.rehearsal.stages import layer_weights, transformer_engine_notes, with_local_layers
from roll_batching.tools.rehearsal.task import CRITIC, ROLLOUT, TEACHER, PhasePeak, RankReport, RankTask

_FIRST_STEP = "first step"
"""Phase of the step that creates the optimizer state; it is not reported."""


def rehearse_rank(task: RankTask) -> RankReport:
    """Rehearse `task` on fake tensors. Call it once per process, because patches and process groups stay."""
    architecture = task.config.actor_train.model_args.architecture
    if architecture is not None and architecture.vision is not None:
        from roll_batching.tools.rehearsal.encoder import rehearse_encoders  # few models take images

        rehearse_encoders(task.device)  # before torch is patched, as it imports transformers
    if task.device == "cuda":
        fake_cuda.install()
    fake_world.join(task.rank, task.world_size)
    fake_world.patch_for_fake_tensors()
    if architecture is not None and architecture.moe is not None:
        assume_balanced_routing(task.expert_imbalance)
    with fake_world.fake_device(task.device):
        return observe(task)


def observe(task: RankTask, *, with_values: bool = False) -> RankReport:
    """Run the passes of `task` and report on them. `with_values`: on real tensors, in a real process group."""
    started = time.perf_counter()
    recorder = Recorder(task.device)
    job = task.config if task.layers is None else with_layers(task.config, task.layers)
    config = with_local_layers(job)
    with recorder, recorder.tracking_modules():
        passes = passes_of(
            config, recorder, task.lengths, task.micro_batches, cp_size=task.cp_size, with_values=with_values
        )
        passes.align(job)
        _name_modules(recorder, passes)
        with recorder.all_as(_FIRST_STEP):
            passes.first_step()
        first = recorder.clock + 1
        notes = passes.roll_out() + passes.host_notes() + routing_notes(config, task.expert_imbalance)
        notes += transformer_engine_notes(job)
        tokens = passes.run(recorder)
    report = _report(recorder, passes, tokens, notes, time.perf_counter() - started)
    if not task.timeline:
        return report
    kinds = _kinds(recorder, passes)
    return replace(report, timeline=timeline_of(recorder.blocks, kinds, recorder.phases, first))


def _name_modules(recorder: Recorder, passes: Passes) -> None:
    chunks = passes.policy.chunks
    for number, chunk in enumerate(chunks):
        recorder.name_modules(chunk, f"chunk {number}" if len(chunks) > 1 else "")
    for name, frozen in passes.frozen_chunks.items():
        for chunk in frozen:
            recorder.name_modules(chunk, name)
    for chunk in () if passes.critic is None else passes.critic.chunks:
        recorder.name_modules(chunk, "critic")


def _kinds(recorder: Recorder, passes: Passes) -> dict[int, str]:
    models = {"": passes.policy} | ({} if passes.critic is None else {CRITIC: passes.critic})
    parts = {name: (model.chunks, model.optimizer) for name, model in models.items()}
    return kinds_of(recorder, parts, passes.frozen_chunks)


def _report(
    recorder: Recorder, passes: Passes, tokens: dict[str, int], notes: tuple[str, ...], seconds: float
) -> RankReport:
    policy = passes.policy
    kinds = _kinds(recorder, passes)
    calls: dict[str, tuple[float, float]] = {}
    for call in recorder.collectives:
        if call.phase in (_FIRST_STEP, "build"):
            continue
        key = f"{call.phase} / {call.group} ({call.size}) / {call.name}"
        count, size = calls.get(key, (0, 0))
        calls[key] = count + 1, size + call.bytes
    reads = Counter(
        f"{read.phase}: {read.place}" for read in recorder.host_reads if read.phase not in (_FIRST_STEP, "build")
    )
    peaks = peaks_of(recorder.blocks, kinds, recorder.phases)
    return RankReport(
        rank=get_rank(),
        stage=policy.layout.pp_rank,
        parameters=sum(p.numel() for chunk in policy.chunks for p in chunk.parameters()),
        # Without a backward pass TransformerEngine copies a weight by rows only.
        layer_weights=sum(layer_weights(model.chunks) for model in (policy, passes.critic) if model is not None)
        + sum(map(layer_weights, passes.frozen_chunks.values())) / 2,
        kept=kept_bytes(recorder.blocks, kinds),
        peaks={
            phase: _without_offloaded(peak, is_rl(passes.config)) if passes.config.is_offload_states else peak
            for phase, peak in peaks.items()
            if phase != _FIRST_STEP
        },
        flops={phase: float(count) for phase, count in recorder.flops.items() if phase not in (_FIRST_STEP, "build")},
        collectives=calls,
        host_reads=dict(reads),
        micro_batches=passes.count(),
        tokens=tokens,
        notes=notes,
        training=passes.training(),
        critic=passes.critic_training(),
        seconds=seconds,
    )


def _without_offloaded(peak: PhasePeak, of_rl: bool) -> PhasePeak:
    """Copy of `peak` without the states that the job offloads to the host during its phase.

    `of_rl`: whether the job is RL; a supervised job offloads its teacher only.
    """
    if peak.phase == "build":
        return peak  # states are offloaded only once all models are built
    states = {"gradients", "optimizer"}
    offloaded = {"reference", TEACHER} if of_rl else {TEACHER}
    if peak.phase in ROLLOUT:
        offloaded |= {*states, *(CRITIC + kind for kind in states)}
    offloaded -= {peak.phase}  # the phase of a frozen model, which is then on the device, has the name of its kind
    kinds = {kind: size for kind, size in peak.kinds.items() if kind not in offloaded}
    return replace(peak, bytes=peak.bytes - sum(peak.kinds.values()) + sum(kinds.values()), kinds=kinds)


def with_layers(config: JobConfig, layers: int) -> JobConfig:
    """Copy of `config` whose models have `layers` layers, equally many in all pipeline stages."""
    chunks = config.actor_train.strategy_args.strategy_config.vpp_size
    for role in ("actor_train", "reference", "critic", "teacher", "actor_infer"):
        if getattr(config, role) is None:
            continue
        if role != "actor_infer":
            config = with_value(config, f"{role}.model_args.architecture.num_layers", layers)
        strategy = getattr(config, role).strategy_args.strategy_config
        if strategy.has_uneven_stages:
            equal = {key: type(strategy).model_fields[key].default for key in SPLIT_KEYS}
            equal["virtual_pipeline_model_parallel_size"] = chunks if chunks > 1 else None
            equal_stages = strategy.model_copy(update=equal)
            config = with_value(config, f"{role}.strategy_args.strategy_config", equal_stages)
    return config


# ---- memory by kind and phase


_LAYER = re.compile(r"\blayers\.\d+\b")


def kinds_of(
    recorder: Recorder, trained: Mapping[str, tuple[Sequence[Any], Any]], frozen: Mapping[str, Sequence[Any]]
) -> dict[int, str]:
    """Kind of each storage that outlives a step, by its index in `recorder.blocks`.

    Args:
        recorder: has recorded the storages.
        trained: (chunks, optimizer) of the policy and the critic, by the prefix of their kinds ("", `CRITIC`).
        frozen: chunks of the reference and the teacher, by kind.
    """
    kinds: dict[int, str] = {}

    def mark(tensors: Iterable[Any], kind: str) -> None:
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and (index := recorder.block_of(tensor)) is not None:
                kinds.setdefault(index, kind)

    for name, (chunks, _) in trained.items():
        for chunk in chunks:
            for buffer in (*getattr(chunk, "buffers", ()), *getattr(chunk, "expert_parallel_buffers", ())):
                mark([buffer.grad_data], f"{name}gradients")
                mark([buffer.param_data], f"{name}weights")
            mark(chunk.parameters(), f"{name}weights")
            mark((getattr(p, "main_grad", None) for p in chunk.parameters()), f"{name}gradients")
    for name, chunks in frozen.items():
        for chunk in chunks:
            mark(chunk.parameters(), name)
    for name, (_, optimizer) in trained.items():
        if optimizer is not None:
            for part in getattr(optimizer, "chained_optimizers", [optimizer]):
                for group in part.optimizer.param_groups:
                    mark(group["params"], f"{name}optimizer")
                for state in part.optimizer.state.values():
                    mark(state.values(), f"{name}optimizer")
    return kinds


def kept_bytes(blocks: Sequence[Block], kinds: Mapping[int, str]) -> dict[str, float]:
    """Bytes of the storages that are still held at the end, by kind."""
    total: dict[str, float] = {}
    for at, kind in kinds.items():
        if blocks[at].freed is None:
            total[kind] = total.get(kind, 0) + blocks[at].size
    return total


def peaks_of(blocks: Sequence[Block], kinds: Mapping[int, str], phases: Sequence[str]) -> dict[str, PhasePeak]:
    """Peak memory of each phase.

    Args:
        blocks: all storages.
        kinds: kind of each storage that outlives a step, by index; the others are inputs or activations.
        phases: phase of every tick of the recorder's clock.
    """
    if not blocks:
        return {}
    sizes = np.array([block.size for block in blocks])
    born = np.array([block.born for block in blocks])
    end = len(phases)
    freed = np.array([end if block.freed is None else block.freed for block in blocks])
    change = np.zeros(end + 2, dtype=np.int64)
    np.add.at(change, born, sizes)
    np.add.at(change, freed + 1, -sizes)  # a storage freed by an operation is still held while the operation runs
    held = np.cumsum(change)[:end]
    peaks = {}
    names = np.array(phases)
    for phase in dict.fromkeys(phases):
        moments = np.flatnonzero(names == phase)
        at = int(moments[np.argmax(held[moments])])
        alive = np.flatnonzero((born <= at) & (freed >= at))
        peaks[phase] = _peak(phase, blocks, kinds, alive, int(held[at]))
    return peaks


def timeline_of(
    blocks: Sequence[Block], kinds: Mapping[int, str], phases: Sequence[str], first: int, points: int = 1200
) -> tuple[tuple[str, dict[str, float]], ...]:
    """(Phase, bytes by kind) at the peak of each of `points` intervals, from the operation `first` on."""
    end = len(phases)
    change: dict[str, Any] = {}
    for at, block in enumerate(blocks):
        moves = change.setdefault(_kind(at, block, kinds), np.zeros(end + 2, dtype=np.int64))
        moves[block.born] += block.size
        moves[(end if block.freed is None else block.freed) + 1] -= block.size
    held = {kind: np.cumsum(moves)[:end] for kind, moves in change.items()}
    total = np.sum(list(held.values()), axis=0)
    edges = np.linspace(first, end, min(points, end - first) + 1).astype(np.int64)
    timeline = []
    for low, high in zip(edges[:-1], edges[1:], strict=True):
        at = int(low + np.argmax(total[low : max(high, low + 1)]))
        timeline.append((phases[at], {kind: float(values[at]) for kind, values in held.items()}))
    return tuple(timeline)


def _kind(at: int, block: Block, kinds: Mapping[int, str]) -> str:
    return kinds.get(at) or ("inputs" if block.phase.removeprefix(CRITIC) == "inputs" else "activations")


def _peak(phase: str, blocks: Sequence[Block], kinds: Mapping[int, str], alive: Any, total: int) -> PhasePeak:
    by_kind: dict[str, float] = {}
    holders: dict[str, float] = {}
    for at in map(int, alive):
        block = blocks[at]
        kind = _kind(at, block, kinds)
        by_kind[kind] = by_kind.get(kind, 0) + block.size
        if kind == "activations":
            name = holder(block)
            holders[name] = holders.get(name, 0) + block.size
    return PhasePeak(phase=phase, bytes=total, kinds=by_kind, holders=holders)


def holder(block: Block) -> str:
    """Name of a storage for reports: its module and tensor, with `*` for the number of the layer."""
    return f"{_LAYER.sub('layers.*', block.owner) or block.phase} {block.tensor}"
