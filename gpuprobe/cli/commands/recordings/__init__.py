"""Commands that make or read recordings."""
