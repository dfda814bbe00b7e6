"""What pipeline stages ask of a plan: how many micro-batches, in which order, under Megatron's schedules."""
