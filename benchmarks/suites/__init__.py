"""One module for each claim."""
