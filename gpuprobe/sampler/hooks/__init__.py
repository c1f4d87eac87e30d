"""Where the sampler attaches to torch."""
