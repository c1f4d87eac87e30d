"""Output formats: results as sections and documents, and their renderers."""
