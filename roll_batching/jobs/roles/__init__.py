"""Samplers and references with a parallel layout, or devices, of their own."""
