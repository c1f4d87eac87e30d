"""What a program does with a value that it reads, found in its source."""
