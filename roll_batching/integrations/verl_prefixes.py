"""verl with common prefixes computed once behind its own passes, and its micro-batches planned for that.

    actor_rollout_ref: {model: {external_lib: roll_batching.integrations.verl_prefixes}}

Importing this module imports `integrations.verl`, whose plans read prefixes then, and replaces
`MegatronEngine._build_megatron_module`: the models that it builds share prefixes (`integrations.prefixes`). verl's
packing, passes, fused kernels and losses stay its own. Value models share nothing.

Source: verl/workers/engine/megatron/transformer_impl.py of verl 0.9.1 and of main at 1dda039.
"""

from __future__ import annotations

from typing import Any

from roll_batching.integrations.host_plans import plan_with_prefixes
from roll_batching.integrations.prefixes import share_prefixes_behind
from roll_batching.integrations.replacement import Integration, Replacement
from roll_batching.integrations.verl import patch as plan_for_verl


def _build_megatron_module(self: Any) -> Any:
    """Verl's model chunks, which share the prefixes of a pack. Collective."""
    chunks = _VERL.original(_BUILD)(self)
    if not self.is_value_model:
        share_prefixes_behind(chunks)
    return chunks


_BUILD = Replacement(
    module="verl.workers.engine.megatron.transformer_impl",
    name="MegatronEngine._build_megatron_module",
    by=_build_megatron_module,
)
_VERL = Integration("verl", _BUILD, package="verl", distribution="verl", tried=("0.9.1", "main at 1dda039"))
patch, unpatch = _VERL.patch, _VERL.unpatch
patch()
plan_for_verl()
plan_with_prefixes("verl")
