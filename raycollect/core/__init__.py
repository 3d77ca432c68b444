"""What all other folders stand on: shared values, protocols of backends, shared memory, threads, Ray's internals."""
