"""Adapters for other frameworks: their functions and classes over the plugin, one module per framework."""
