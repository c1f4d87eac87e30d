"""Ranks compared with each other: memory, time, and what their collectives have in common."""
