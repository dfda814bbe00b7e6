"""Checks that need a GPU, started by scripts/gpu_checks.sh."""
