"""Programs and libraries of other people's making, on the simulated GPU."""
