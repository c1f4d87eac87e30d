"""Causes: why memory that a program does not need is there. One rule a file, in `causes.rules`."""
