"""Changes that cost time, and harmless ones, for `benchmarks/step_time_gate.py`."""
