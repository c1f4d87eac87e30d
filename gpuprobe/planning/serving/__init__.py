"""Estimates of inference servers: vLLM starts on simulated GPUs until its engine is up."""
