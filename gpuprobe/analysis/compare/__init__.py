"""Two recordings compared: what changed, and why."""
