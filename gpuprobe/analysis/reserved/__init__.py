"""Memory that is reserved or held beyond tensors."""
