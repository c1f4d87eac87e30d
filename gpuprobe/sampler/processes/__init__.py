"""Processes that a program starts: recorded as ranks, or counted."""
