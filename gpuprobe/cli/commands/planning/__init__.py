"""Commands about GPUs that are not here."""
