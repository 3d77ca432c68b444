"""Groups: who is in them, how their members find each other, and what the calls of members run on."""
