"""One virtual CUDA device: its allocator, statistics and memory history."""
