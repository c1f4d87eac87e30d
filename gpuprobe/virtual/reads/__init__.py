"""Values that a program reads: which are known, and what it does with those that are not."""
