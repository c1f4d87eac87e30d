"""Annotations, JUnit and SARIF."""
