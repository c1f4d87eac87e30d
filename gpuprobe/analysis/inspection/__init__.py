"""What a screen shows of one step or one trace, computed when it is asked for."""
