"""What is recorded of a run: session, steps, phases, totals."""
