"""Finds the changed lines of a program that made its memory grow."""
