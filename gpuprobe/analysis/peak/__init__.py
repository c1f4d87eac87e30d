"""The blocks at the peak of memory, and at failed allocations."""
