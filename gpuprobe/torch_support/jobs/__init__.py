"""What both engines need of `torch.distributed`: what a rank sends, and how ranks differ."""
