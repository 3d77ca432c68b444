"""The driver's side: operations, and plans from their dispatch to their end."""
