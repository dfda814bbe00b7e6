"""Runs code of the model for tests: sandboxed, without the job's secrets, within limits."""
