"""Benchmarks (bench_*.py), their shared modules, and recorded figures (*.json)."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""The checkout."""
