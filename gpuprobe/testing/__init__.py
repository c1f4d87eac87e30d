"""Fakes that users may use in their own tests."""
