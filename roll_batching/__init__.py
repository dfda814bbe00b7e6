"""roll-batching: plans, packs and balances every training step on Megatron-Core.

`planning`, `settings` and `jobs.config` need no torch; everything else needs the extra `megatron`. `strategy` is the
plugin; `jobs` builds on it. This module imports nothing, so that the packages without torch stay light.
"""

__version__ = "0.2.0"
