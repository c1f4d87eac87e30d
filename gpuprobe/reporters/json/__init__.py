"""Reports as versioned JSON documents."""
