"""Feeds the hazard engine, on CUDA and on the virtual GPU."""
