"""``torch.compile`` on a virtual device: Inductor's own wrapper runs, its kernels do nothing."""
