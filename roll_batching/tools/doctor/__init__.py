"""`roll-batching doctor`: checks of machines, ranks, kernels, layouts and the run folder where a job will run."""
