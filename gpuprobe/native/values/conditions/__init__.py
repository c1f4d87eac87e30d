"""Which side a program takes at a condition that depends on values which are not computed."""
