"""What reports to the hazard engine, on CUDA and on the virtual GPU."""
