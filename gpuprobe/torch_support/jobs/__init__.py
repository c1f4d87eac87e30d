"""What both simulated engines need of `torch.distributed`: what ranks send, how they differ."""
