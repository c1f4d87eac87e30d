"""Tells what a short text is about."""
