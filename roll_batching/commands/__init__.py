"""One file per command of `roll-batching`."""
