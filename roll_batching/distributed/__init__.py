"""Process groups, the parallel layout, and errors that are raised on all ranks together."""

from roll_batching.distributed.consensus import Facts, consensus, digest, exchange
from roll_batching.distributed.groups import group_device, group_timeout, host_group, megatron_data_parallel_group

__all__ = [
    "Facts",
    "consensus",
    "digest",
    "exchange",
    "group_device",
    "group_timeout",
    "host_group",
    "megatron_data_parallel_group",
]
