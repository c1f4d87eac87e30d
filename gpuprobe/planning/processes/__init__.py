"""Processes that an estimated program starts, and what they need of its GPUs."""
