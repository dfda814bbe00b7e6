"""Megatron models for packed sequences: builder, layer spec, attention cores, RoPE, output head, experts."""
