"""Programs of the corpus, by what they are about."""
