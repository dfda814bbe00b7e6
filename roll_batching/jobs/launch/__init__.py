"""Starting the processes of a job, one per rank, and ending all of them together."""
