"""The differences between two recordings, and their causes."""
