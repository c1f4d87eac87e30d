"""Remedies as edits of a program's source, and as settings: what a trial runs and a patch shows."""
