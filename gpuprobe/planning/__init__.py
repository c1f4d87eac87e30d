"""What would happen on a GPU that is not here: the figures of an estimate, the search of a fit."""
