"""Metrics of GPUs and runs, and the formats they are exported in."""
