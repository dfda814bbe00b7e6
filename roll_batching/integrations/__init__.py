"""Adapters for other frameworks, one module each; those that replace a host's functions do so when imported."""
