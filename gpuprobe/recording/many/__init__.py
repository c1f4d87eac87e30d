"""Many ranks: steps read in columns, and processes that a program started."""
