"""Happens-before engine for stream hazards: pure code, no torch."""
