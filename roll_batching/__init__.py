"""roll-batching: plans, packs and balances every training step on Megatron-Core.

`planning`, `settings` and `jobs.config` need no torch; all else needs the extra `megatron`. `strategy` is the plugin,
`jobs` are built on it. Nothing is imported here, so that the light rooms stay light.
"""

__version__ = "0.2.0"
