"""Estimates of runs on a GPU that this machine lacks, and the search for the largest that fits."""
