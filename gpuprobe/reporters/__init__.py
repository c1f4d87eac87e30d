"""One file per output format, each from plain data to a stream."""
