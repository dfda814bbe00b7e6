"""Whole jobs on top of the strategies: SFT, DPO and GRPO from a YAML file, with all that they need around them."""
