"""NeMo-RL's Megatron policy worker with common prefixes computed once behind its own passes.

    Policy(..., worker_extension_cls_fqn="roll_batching.integrations.nemo_rl_prefixes.MegatronPolicyWorker")
    policy: {sequence_packing: {enabled: true, algorithm: roll_batching_prefixes}}

The worker's model shares the prefixes of a bin (`integrations.prefixes`); NeMo-RL's packing, passes and losses stay its
own. The packer's name is known where the run script imports `integrations.nemo_rl`, and puts samples that begin alike
into one bin.

Source: nemo_rl/models/policy/workers/megatron_policy_worker.py at 7ea279a.
"""

from __future__ import annotations

from typing import Any

from roll_batching.integrations.prefixes import share_prefixes_behind
from roll_batching.integrations.replacement import policy_worker


def __getattr__(name: str) -> Any:
    return policy_worker(__name__, name, lambda worker: share_prefixes_behind(worker.model))
