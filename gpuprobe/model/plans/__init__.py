"""What a run would need on another GPU: estimates and fits."""
