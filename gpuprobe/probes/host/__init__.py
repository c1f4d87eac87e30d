"""The machine and the processes on it."""
