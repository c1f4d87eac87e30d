"""What grows from step to step, and when memory runs out."""
