"""Samplers and references with a separate parallel layout or separate devices."""
