"""`doctor --distributed`: a check of a job's ranks, their collectives, clocks and links."""
