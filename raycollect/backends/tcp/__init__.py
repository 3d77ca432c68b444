"""Backend `tcp`: plain sockets between any machines."""
