"""What the rooms that work inside torch share: what its tensors are made of."""
