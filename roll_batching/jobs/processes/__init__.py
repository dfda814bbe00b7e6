"""Processes that a job starts beside its ranks."""
