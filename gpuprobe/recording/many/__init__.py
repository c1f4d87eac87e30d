"""Recordings of many ranks: steps that are read in columns, and recordings packed into one file."""
