"""Hooks around a training step, on CUDA and on the CPU."""
