"""Which changed line of a program made its memory grow."""
