"""Parts of the benchmark of the simulation."""
