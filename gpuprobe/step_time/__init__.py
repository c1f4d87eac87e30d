"""How long a step takes on a GPU that this machine lacks: prices of kernels, and their replay."""
