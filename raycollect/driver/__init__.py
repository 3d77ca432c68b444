"""The driver's side: operations, plans on their way to the participants, and what becomes of them."""
