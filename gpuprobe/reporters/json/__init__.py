"""Results as versioned JSON documents, and the schemas of these."""
