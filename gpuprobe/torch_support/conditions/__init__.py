"""Which way a program goes at a condition that depends on values which are not computed."""
