"""The driver's side: verbs, plans on their way to the participants, and what becomes of them."""
