"""Pure functions from recordings and traces to results."""
