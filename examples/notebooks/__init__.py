"""Notebooks that show what the library does, with their outputs."""
