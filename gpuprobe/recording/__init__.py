"""Reading and writing recordings, and safe import of torch memory snapshots."""
