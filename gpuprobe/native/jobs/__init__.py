"""One rank of a job on the native engine, whose other ranks are no processes."""
