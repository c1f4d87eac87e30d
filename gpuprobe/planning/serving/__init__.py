"""Estimates of inference servers: vLLM is started on the native engine until it is up."""
