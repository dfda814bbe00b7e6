"""Megatron models that take packs: builder, layer spec, attention core, RoPE, output head, the CPU platform."""
