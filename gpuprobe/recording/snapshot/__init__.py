"""Safe import of torch's memory snapshots; their pickles are never executed."""
