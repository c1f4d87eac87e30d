"""One rank of a job on the simulated GPU, whose other ranks are no processes."""
