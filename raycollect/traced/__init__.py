"""Functions that are traced into captured steps."""
