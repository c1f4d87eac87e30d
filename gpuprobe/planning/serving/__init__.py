"""Estimates of inference servers: vLLM starts on the native engine until its engine is up."""
