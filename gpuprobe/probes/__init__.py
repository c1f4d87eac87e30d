"""Device probes: one file per source, reconciled by identity."""
