"""Reports as text for terminals."""
