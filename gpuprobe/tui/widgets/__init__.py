"""Widgets and drawing shared by all screens."""
