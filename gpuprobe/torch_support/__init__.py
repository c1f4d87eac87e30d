"""What the rooms that work inside torch share: its frames, and what its tensors are made of."""
