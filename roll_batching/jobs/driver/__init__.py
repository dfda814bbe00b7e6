"""Your own training loop on Ray: a driver with the samples, and a strategy whose ranks are actors.

`group.WorkerGroup` is the public class; the other modules implement it.
"""
