"""Time travel through a memory trace."""
