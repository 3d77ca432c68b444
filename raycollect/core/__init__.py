"""What all other folders stand on, without Ray: shared values, protocols of backends, shared memory, threads."""
