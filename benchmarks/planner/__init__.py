"""The planner's benchmark: cases, peers' planners, the sweep, and limits."""
