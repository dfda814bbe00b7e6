"""Step times on paper: passes, exchange and waiting of a plan on a cluster, predicted without running anything."""

from roll_batching.planning.simulated_step import SimulatedStep, simulate_plan
from roll_batching.tools.simulation.models import CLUSTERS, MODELS, architecture_times, read_architecture, read_cluster
from roll_batching.tools.simulation.scenario import Scenario, run_sweep, simulate_single_sizes

__all__ = [
    "CLUSTERS",
    "MODELS",
    "Scenario",
    "SimulatedStep",
    "architecture_times",
    "read_architecture",
    "read_cluster",
    "run_sweep",
    "simulate_plan",
    "simulate_single_sizes",
]
