"""Backend `gloo`: pygloo, or xoscar's fork of it."""
