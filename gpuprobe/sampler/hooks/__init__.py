"""The sampler's hooks into torch."""
