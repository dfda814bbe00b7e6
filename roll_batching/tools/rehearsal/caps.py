"""Caps from memory: the largest values of a job's `auto` caps that fit, the same on all ranks."""

from __future__ import annotations

import datetime
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from roll_batching.errors import ConfigError, RankError, RollBatchingError
from roll_batching.jobs.config import JobConfig
from roll_batching.jobs.config.auto_caps import auto_caps, smallest_cap
from roll_batching.jobs.config.diagnostics import Problem
from roll_batching.jobs.config.engine_rules import SERVED, engine_sleeps, shares_devices, starts_servers, uses_engine
from roll_batching.jobs.launch.rendezvous import RankInfo
from roll_batching.jobs.processes.child_process import RESTARTS, notify
from roll_batching.jobs.run.checkpoint import FOLDER, saved_point
from roll_batching.settings.batching import CAP_KEYS
from roll_batching.settings.fields import Pass
from roll_batching.tools.rehearsal.advice import Cap, Rehearse, Search, caps_of
from roll_batching.tools.rehearsal.job import GIB, Rehearsal, rehearse_job

STEP = 16
"""Granularity of auto caps in tokens."""
_MIB = 1 << 20
_PROBES = 10
"""Most rehearsals of a search."""
_SLEEPING = 1.0 * GIB
"""Memory that a sleeping engine keeps: CUDA's context and its kernels."""
_HOURS = 2.0
"""Longest wait of a rank for the caps; rank 0, where it fails, tells the others at once."""


@dataclass(frozen=True, kw_only=True)
class FoundCaps:
    """The largest caps with which a job fits."""

    caps: Mapping[str, int]
    """Tokens by dotted path."""
    rehearsal: Rehearsal
    """The job with these caps, or with slightly smaller ones."""
    probes: int
    """Number of rehearsals."""


def find_caps(config: JobConfig, limit: float, rehearse: Rehearse) -> FoundCaps:
    """Searches the largest values of the auto caps of `config` with which each rank needs at most `limit` bytes.

    One search for each key, over the memory of the phases that it bounds. All searches share the rehearsals. A key
    that bounds no phase takes the training cap of its role. Results are within 2% of the largest rehearsed value that
    fits. Raises ConfigError when not even one longest sample fits.
    """
    keys = auto_caps(config.roles)
    longest = smallest_cap(config)
    best = rehearse(config.with_resolved_caps(dict.fromkeys(keys, longest)))
    searches = list(_searches(best, keys, longest, limit))
    peaks = dict.fromkeys(name for stage in best.stages for name in stage.report.peaks)
    free = [name for name in peaks if not any(name in search.cap.phases for search in searches)]
    too_large = [(", ".join(free), best.need_in(free))] if best.need_in(free) > limit else []
    too_large += [(search.cap.key, search.needs[longest]) for search in searches if search.below is None]
    if too_large:
        needs = "; ".join(f"{name}: {math.ceil(need / _MIB):,} MiB" for name, need in too_large)
        raise ConfigError(
            f"no cap fits {math.floor(limit / _MIB):,} MiB: micro-batches of one longest sample, {longest:,} "
            f"tokens, need more ({needs}). `roll-batching rehearse --config FILE --gpu-memory SIZE` lists settings "
            "that need less"
        )
    probes = 1
    while probes < _PROBES and (guesses := {s.cap.key: guess for s in searches if (guess := s.guess()) is not None}):
        caps = {search.cap.key: search.below or longest for search in searches} | guesses
        outcome, probes = rehearse(config.with_resolved_caps(_all(keys, caps, longest))), probes + 1
        for search in searches:
            search.needs[caps[search.cap.key]] = outcome.need_in(search.cap.phases)
        best = outcome if outcome.fits(limit) else best
    found = _all(keys, {search.cap.key: search.below or longest for search in searches}, longest)
    return FoundCaps(caps=found, rehearsal=best, probes=probes)


def _searches(rehearsal: Rehearsal, keys: list[str], longest: int, limit: float) -> list[Search]:
    """A search for each of `keys` that bounds the memory of a phase."""
    config, dp_size = rehearsal.config, rehearsal.dims.dp_size
    phases: dict[str, tuple[str, ...]] = {}
    kinds: dict[str, Pass] = {key: kind for (_, kind), key in CAP_KEYS.items()}
    for cap in caps_of(config, rehearsal.dims):
        name, _, rest = cap.key.partition(".")
        key = f"{name}.{config.roles[name].cap_key(kinds[rest])}" if rest in kinds else ""
        if key in keys:
            phases[key] = (*phases.get(key, ()), *cap.phases)
    samples = max(config.mini_batch_size(dp_size), 0 if config.is_supervised else config.samples_per_rollout)
    most = max(longest, -(-samples // dp_size) * longest)
    return [
        Search(
            Cap(key=key, value=longest, least=longest, step=STEP, phases=bounded, most=most),
            limit,
            {longest: rehearsal.need_in(bounded)},
        )
        for key, bounded in phases.items()
    ]


def _all(keys: list[str], caps: Mapping[str, int], least: int) -> dict[str, int]:
    """`caps` for all of `keys`: one that bounds no phase has the training cap of its role."""
    of_role = {key.partition(".")[0]: value for key, value in reversed(list(caps.items()))}
    return {key: caps.get(key, of_role.get(key.partition(".")[0], least)) for key in keys}


# ---- in a run


def usable_memory(config: JobConfig) -> float:
    """Bytes of this rank's device for the job: `device_memory_limit`, or the GPU's free memory without its engine's.

    Raises ConfigError on a CPU without a limit, and for an engine on the same device whose share is not given.
    """
    if config.device_memory_limit is not None:
        return float(config.device_memory_limit)
    import torch

    if not torch.cuda.is_available():
        text = f"is missing: {auto_caps(config.roles)[0]} is auto, and a CPU has no memory of its own to measure. Set"
        raise config.error(Problem(("device_memory_limit",), f"{text} a size, such as 4GiB"))
    free, total = torch.cuda.mem_get_info(int(os.environ.get("LOCAL_RANK", "0")))
    return free - engine_memory(config, total)


def engine_memory(config: JobConfig, total: float) -> float:
    """Bytes that servers of the job will hold of a device of `total` bytes while the model trains.

    Raises ConfigError for servers without a given share, and for samplers whose memory is not known.
    """
    is_copy = uses_engine(config) and config.actor_infer.strategy_args.strategy_name not in SERVED
    is_copy = is_copy or (config.has_sampler and not uses_engine(config))
    if is_copy and config.own_devices("actor_infer") is None:
        text = "samples with a copy of the model on the devices of training, which a rehearsal does not count, and caps"
        raise config.error(Problem(("actor_infer",), f"{text} are auto. Give it a device_mapping, or give numbers"))
    if not (starts_servers(config) and shares_devices(config)):
        return 0.0  # servers that run already are not in the free memory
    if engine_sleeps(config):
        return _SLEEPING
    options = config.actor_infer.strategy_args.engine_options
    share = options.get("gpu_memory_utilization", options.get("mem_fraction_static"))
    if share is None:
        text = "is missing: the engine shares the devices of training and does not sleep, and caps are auto. Set"
        path = ("actor_infer", "strategy_args", "strategy_config", "gpu_memory_utilization")
        raise config.error(Problem(path, f"{text} its share (sglang: mem_fraction_static), or is_offload_states: true"))
    return float(share) * total


def resolve_caps(config: JobConfig, info: RankInfo, store: Any) -> JobConfig:
    """`config` with numbers in place of its auto caps, the same on all ranks; `store`: that of the rendezvous.

    Every rank calls it. Rank 0 takes the caps of the checkpoint that the run resumes from, else it rehearses with the
    smallest memory of all ranks, while the others wait. Raises RankError, the same on all ranks.
    """
    prefix = f"roll-batching/caps/{os.environ.get(RESTARTS, '0')}"  # a store may outlive a restart
    wait = partial(_value_at, store)
    store.set(f"{prefix}/{info.rank}", _attempt(partial(usable_memory, config)))
    if info.rank == 0:
        memory = (wait(f"{prefix}/{rank}") for rank in range(info.world_size))
        store.set(prefix, _attempt(lambda: _decide(config, min(memory), info.world_size)))
    try:
        return config.with_resolved_caps(wait(prefix))
    finally:  # rank 0 may hold the store, and end with an error: it waits until all have read it
        store.set(f"{prefix}/{info.rank}/done", "")
        if info.rank == 0:
            done = [f"{prefix}/{rank}/done" for rank in range(info.world_size)]
            store.wait(done, datetime.timedelta(minutes=config.actor_train.backend_timeout))


def _decide(config: JobConfig, limit: float, world_size: int) -> dict[str, int]:
    keys, setting = auto_caps(config.roles), config.resume_from_checkpoint
    point = saved_point(config.run_folder / FOLDER if setting is True else Path(setting)) if setting else None
    if point is not None and set(point.caps) == set(keys):
        caps, source = {key: point.caps[key] for key in keys}, f"as in {point.path}"
    else:
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
        found = find_caps(config, limit, partial(rehearse_job, world_size=world_size, device=device))
        caps, source = dict(found.caps), f"found in {limit / _MIB:,.0f} MiB by {found.probes} rehearsals"
    notify(f"auto caps, {source}: " + ", ".join(f"{key}={value}" for key, value in caps.items()))
    return caps


def _attempt(function: Callable[[], Any]) -> str:
    """JSON of what `function` returns, or of its error."""
    try:
        return json.dumps({"value": function()})
    except RollBatchingError as error:
        return json.dumps({"error": str(error)})
    except Exception as error:
        return json.dumps({"error": f"resolving auto caps failed with {type(error).__name__}: {error}"})


def _value_at(store: Any, key: str) -> Any:
    """Waits for the JSON of `_attempt` at `key`; returns its value. Raises RankError with its error."""
    store.wait([key], datetime.timedelta(hours=_HOURS))
    outcome = json.loads(store.get(key))
    if "error" in outcome:
        raise RankError(outcome["error"])
    return outcome["value"]
