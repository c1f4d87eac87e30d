"""Level ``trace``: allocations and the tensors they belong to, on CUDA and on the CPU."""
