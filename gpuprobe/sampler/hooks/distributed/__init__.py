"""Calls of ``torch.distributed``: what they send, and how long the program waits in them."""
