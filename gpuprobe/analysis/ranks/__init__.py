"""Comparisons of ranks: memory, time, and collectives."""
