"""What a screen shows of one step or one trace, computed on demand."""
