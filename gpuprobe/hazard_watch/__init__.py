"""What reports to the hazard engine: the use of torch's CUDA, on a GPU or a simulated one."""
