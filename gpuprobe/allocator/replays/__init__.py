"""Replaying recorded allocations exactly, and under other settings."""
