"""What was allocated when memory was highest, and when it ran out."""
