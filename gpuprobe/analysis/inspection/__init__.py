"""Details of one step or one trace for a screen, computed on demand."""
