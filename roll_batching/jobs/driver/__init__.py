"""Your own training loop on Ray: one process that has the samples, and a strategy whose ranks are actors.

`driver.group.WorkerGroup` is what a loop holds; the other modules are what it consists of.
"""
