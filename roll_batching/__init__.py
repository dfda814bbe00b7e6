"""roll-batching: plans, packs and balances every training step on Megatron-Core.

The rooms: `planning` and `config` need no torch; `data`, `packing`, `losses`, `modeling`, `strategy`
and `rl` need the extra `megatron`. Nothing is imported here, so that the light rooms stay light.
"""

__version__ = "0.1.0"
