"""Files for other viewers: flame graphs, Perfetto, torch snapshots."""
