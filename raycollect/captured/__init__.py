"""The driver's side of captured steps."""
