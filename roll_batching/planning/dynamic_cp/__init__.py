"""Search for a context-parallel size per pack."""
