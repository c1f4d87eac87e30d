"""Metrics of this machine and its runs, for Prometheus."""
