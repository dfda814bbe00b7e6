"""Rehearse one rank: build its part of the model, run the passes of a step, and report on them."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace

from torch.distributed import get_rank

from roll_batching.jobs.config import JobConfig
from roll_batching.settings.megatron_config import SPLIT_KEYS
from roll_batching.tools.rehearsal import fake_cuda, fake_world
from roll_batching.tools.rehearsal.experts import assume_balanced_routing, routing_notes
from roll_batching.tools.rehearsal.memory import kept_bytes, kinds_of, peaks_of, timeline_of
from roll_batching.tools.rehearsal.passes import Passes, is_rl, passes_of
from roll_batching.tools.rehearsal.recorder import Recorder
from roll_batching.tools.rehearsal.task import CRITIC, ROLLOUT, TEACHER, PhasePeak, RankReport, RankTask
from roll_batching.tools.rehearsal.transformer_engine import layer_weights, transformer_engine_notes, with_local_layers
from roll_batching.tools.rehearsal.variants import with_value

_FIRST_STEP = "first step"
"""Phase of the step that creates the optimizer state; it is not reported."""


def rehearse_rank(task: RankTask) -> RankReport:
    """Rehearse `task` on fake tensors. Once per process: patches and process groups stay."""
    architecture = task.config.actor_train.model_args.architecture
    if architecture is not None and architecture.vision is not None:
        from roll_batching.tools.rehearsal.encoder import rehearse_encoders  # few models take images

        rehearse_encoders(task.device)  # before torch is patched, as it imports transformers
    if task.device == "cuda":
        fake_cuda.install()
    fake_world.join(task.rank, task.world_size)
    fake_world.patch_megatron()
    if architecture is not None and architecture.moe is not None:
        assume_balanced_routing(task.expert_imbalance)
    with fake_world.fake_device(task.device):
        return observe(task)


def observe(task: RankTask, *, with_values: bool = False) -> RankReport:
    """Run the passes of `task` and report on them; `with_values`: on real tensors in a real process group."""
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
    parts = {name: (one.chunks, one.optimizer) for name, one in models.items()}
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
        layer_weights=_layer_weights(passes),
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


def _layer_weights(passes: Passes) -> float:
    trained = [passes.policy] if passes.critic is None else [passes.policy, passes.critic]
    # Without a backward pass TransformerEngine copies a weight by rows only.
    frozen = sum(map(layer_weights, passes.frozen_chunks.values()))
    return sum(layer_weights(one.chunks) for one in trained) + frozen / 2


def _without_offloaded(peak: PhasePeak, of_rl: bool) -> PhasePeak:
    """`peak` without the state that the job keeps on the host during the phase; a supervised job keeps its teacher."""
    if peak.phase == "build":
        return peak
    states = {"gradients", "optimizer"}
    offloaded = {"reference", TEACHER} if of_rl else {TEACHER}
    if peak.phase in ROLLOUT:
        offloaded |= {*states, *(CRITIC + kind for kind in states)}
    offloaded -= {peak.phase}  # the pass of a frozen model
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
