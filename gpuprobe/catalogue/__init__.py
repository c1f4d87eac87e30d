"""GPUs by name, and what is known of each."""
