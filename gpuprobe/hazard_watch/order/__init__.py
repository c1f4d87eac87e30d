"""Synchronisation by libraries: the backward pass, collectives, other processes."""
