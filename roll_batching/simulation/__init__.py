"""A cluster on paper: when every operation of a plan's pipeline begins and ends."""

from roll_batching.simulation.pipeline import Interval, PipelineRun, StepTime, simulate_pipeline, simulate_plan

__all__ = ["Interval", "PipelineRun", "StepTime", "simulate_pipeline", "simulate_plan"]
